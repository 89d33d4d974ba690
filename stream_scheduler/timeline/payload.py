"""What the page draws, as plain data: short keys, each text once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cannopy.stream_scheduler.plan.model import Decision
from cannopy.stream_scheduler.simulator import Machine
from cannopy.stream_scheduler.timeline.critical import critical_path
from cannopy.stream_scheduler.timeline.load import usage
from cannopy.stream_scheduler.timeline.perfetto import regions
from cannopy.stream_scheduler.timeline.run import Run

BOUNDS = ("cube", "vector", "hbm", "l2", "link", "launch", "event", "cores")
"""What can hold a kernel up; the page knows a colour for each."""


class _Texts:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def payload(runs: Sequence[Run], machine: Machine, lower_bound_us: float | None = None,
            decisions: Sequence[Decision] = ()) -> dict[str, Any]:
    """Everything that a page about ``runs`` on ``machine`` shows, JSON-ready; it can be stored and drawn later.

    Kernels are ``[name, label, kernel, stream, start, end, bound, alone, HBM bytes, L2 bytes, cube, vector, limit,
    layer, SuperKernel, critical, details]``, where names are numbers into ``texts``. ``lower_bound_us``: device time
    and launches that no schedule beats, in microseconds. ``decisions``: what the scheduler did and did not do.

    Raises:
        ValueError: no run, or a run of nothing.
    """
    if not runs or any(not run.trace.spans for run in runs):
        raise ValueError("a timeline needs at least one run with at least one kernel")
    texts = _Texts()
    drawn = [_run(run, texts) for run in runs]
    return {
        "texts": list(texts.numbers), "bounds": BOUNDS, "runs": drawn,
        "machine": {"cube": machine.cube_cores, "vector": machine.vector_cores, "hbm": machine.hbm_rate},
        "lower_bound_us": lower_bound_us, "decisions": [dataclasses.asdict(decision) for decision in decisions],
    }


def _run(run: Run, texts: _Texts) -> dict[str, Any]:
    trace = run.trace
    streams = trace.streams()
    critical = set(critical_path(run.schedule, trace))
    cores = {i.task: (i.cube, i.vector) for i in trace.intervals if i.running}
    kernels = []
    for span in trace.spans.values():
        task = span.task
        limit = "" if task.cores is None else f"c{task.cores[0]}v{task.cores[1]}"
        details = "\n".join(f"{k}: {v}" for k, v in run.details.get(task.name, {}).items() if v)
        cube, vector = cores.get(task.name, (0, 0))
        kernels.append([
            texts(task.name), texts(task.label or task.name), texts(task.load.kernel), streams.index(task.stream),
            round(span.start, 3), round(span.end, 3), _bound(span.bound), round(span.alone_us, 3),
            round(span.hbm_bytes), round(span.resident_bytes), cube, vector, texts(limit),
            -1 if task.layer is None else task.layer, texts(task.super_kernel or ""), int(task.name in critical),
            texts(details),
        ])
    waits = [
        [streams.index(i.stream), round(i.start, 3), round(i.end, 3), _bound(i.bound), texts(i.task)]
        for i in trace.intervals if not i.running and i.end - i.start > 1e-3
    ]
    frames = [
        [streams.index(stream), texts(name), round(start, 3), round(end, 3)]
        for stream in streams for name, start, end in regions(list(trace.of_stream(stream)))
    ]
    fetches = [
        [texts(f.weight), round(f.start, 3), round(f.end, 3), round(f.bytes), round(f.used), texts(f.after)]
        for f in trace.prefetches
    ]
    load = [[round(u.start, 3), u.cube, u.vector, round(u.hbm, 1), round(u.prefetch, 1)] for u in usage(trace)]
    return {"name": run.name, "us": round(trace.us, 3), "host_us": round(trace.host_us, 3), "streams": streams,
            "kernels": kernels, "waits": waits, "frames": frames, "fetches": fetches, "load": load}


def _bound(name: str) -> int:
    """Number of a bound; of one that the page does not know, an error here rather than no colour there."""
    return BOUNDS.index(name)
