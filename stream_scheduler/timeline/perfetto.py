"""Schedules as a trace for ui.perfetto.dev (Chrome's trace event format, JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cannopy.stream_scheduler.simulator import Machine, Span
from cannopy.stream_scheduler.timeline.critical import critical_path
from cannopy.stream_scheduler.timeline.load import usage
from cannopy.stream_scheduler.timeline.run import Run

_PREFETCH = "prefetch"
_REGIONS = "SuperKernel: "


def perfetto(runs: Sequence[Run], machine: Machine) -> dict[str, Any]:
    """A process per run; in it a thread per stream, one for SuperKernel regions of each stream that has any, one for
    prefetches, and counters of cores and HBM. Times are microseconds, which is what the format counts in."""
    events: list[dict[str, Any]] = []
    for number, run in enumerate(runs, 1):
        _run(events, number, run, machine)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _run(events: list[dict[str, Any]], pid: int, run: Run, machine: Machine) -> None:
    streams = run.trace.streams()
    lanes = [*streams, *(f"{_REGIONS}{s}" for s in streams if any(x.task.super_kernel for x in run.trace.of_stream(s)))]
    lanes += [_PREFETCH] if run.trace.prefetches else []
    tids = {lane: number for number, lane in enumerate(lanes, 1)}
    title = f"{run.name} {run.trace.us:.1f} us"
    events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}})
    events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for lane, tid in tids.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    critical = set(critical_path(run.schedule, run.trace))
    for span in run.trace.spans.values():
        events.append(_kernel(run, span, pid, tids[span.task.stream], span.task.name in critical))
    for stream in streams:
        for name, start, end in regions(list(run.trace.of_stream(stream))):
            events.append(_slice(name, "super_kernel", pid, tids[_REGIONS + stream], start, end, {}))
    for fetch in run.trace.prefetches:
        found = {"bytes": fetch.bytes, "bytes used": fetch.used, "after": fetch.after}
        events.append(_slice(fetch.weight, _PREFETCH, pid, tids[_PREFETCH], fetch.start, fetch.end, found))
    events += _waits(run, pid, tids)
    for step in usage(run.trace):
        cores = {"cube": step.cube, "vector": step.vector}
        events.append({"ph": "C", "name": "cores", "pid": pid, "ts": step.start, "args": cores})
        share = 100 * step.hbm / machine.hbm_rate if machine.hbm_rate else 0.0
        events.append({"ph": "C", "name": "HBM %", "pid": pid, "ts": step.start, "args": {"HBM": round(share, 2)}})


def _kernel(run: Run, span: Span, pid: int, tid: int, critical: bool) -> dict[str, Any]:
    task = span.task
    args: dict[str, Any] = {
        "kernel": task.load.kernel, "bound": span.bound, "alone us": round(span.alone_us, 3),
        "HBM bytes": round(span.hbm_bytes), "L2 bytes": round(span.resident_bytes), "critical path": critical,
        "core limit": "none" if task.cores is None else f"c{task.cores[0]}v{task.cores[1]}",
    }
    args |= {"layer": task.layer} if task.layer is not None else {}
    args |= {"SuperKernel": task.super_kernel} if task.super_kernel else {}
    args |= dict(run.details.get(task.name, {}))
    return _slice(task.label or task.name, span.bound, pid, tid, span.start, span.end, args)


def _slice(name: str, category: str, pid: int, tid: int, start: float, end: float,
           args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start,
            "dur": max(0.0, end - start), "args": args}


def regions(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """(name, start, end) of the SuperKernels in the spans of one stream, which are in order."""
    found: list[tuple[str, float, float]] = []
    last = None
    for span in spans:
        name = span.task.super_kernel
        if name and name == last:
            found[-1] = (name, found[-1][1], span.end)
        elif name:
            found.append((name, span.start, span.end))
        last = name
    return found


def _waits(run: Run, pid: int, tids: dict[str, int]) -> list[dict[str, Any]]:
    """An arrow for each dependency from one stream into another."""
    events: list[dict[str, Any]] = []
    for span in run.trace.spans.values():
        for name in span.task.deps:
            source = run.trace.spans.get(name)
            if source is None or source.task.stream == span.task.stream:
                continue
            common = {"name": "wait", "cat": "wait", "id": f"{pid}.{name}.{span.task.name}", "pid": pid}
            inside = source.end - min(source.us / 2, 1e-3)  # an arrow starts in the slice that its time lies in
            events.append({**common, "ph": "s", "tid": tids[source.task.stream], "ts": inside})
            events.append({**common, "ph": "f", "bp": "e", "tid": tids[span.task.stream], "ts": span.start})
    return events
