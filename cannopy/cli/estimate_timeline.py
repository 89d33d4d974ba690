"""`cannopy estimate --timeline`: a described model on one stream, as experts place it, and as the scheduler does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any


def draw(settings: tuple[Any, ...], target: str, folder: Path) -> dict[str, Any]:
    """Write ``timeline.html``, ``trace.json`` and ``plan.yaml`` (the scheduler's) into ``folder``.

    ``settings``: model, load, layout, quantisation, hardware (`estimate.settings`). Returns predicted microseconds per
    step by plan, the lower bound, and the files.
    """
    from cannopy import timelines
    from cannopy.stream_scheduler.network.report import estimate_step, placement_of
    from cannopy.stream_scheduler.plan import to_schedule
    from cannopy.stream_scheduler.plan.text import to_yaml
    from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
    from cannopy.stream_scheduler.scheduler.collectives import groups_by_ranks
    from cannopy.stream_scheduler.simulator import simulate
    from cannopy.stream_scheduler.timeline import Run, payload
    from cannopy.superkernel import SuperKernels

    model, load, parallel, quant, hardware = settings[:5]
    serial = estimate_step(model, load, parallel, quant, hardware)
    expert = estimate_step(model, load, parallel, quant, hardware, placement_of(model, hardware, "expert"))
    options = ScheduleOptions(target, groups=groups_by_ranks(serial.schedule.tasks))
    plan = schedule(serial.schedule, serial.machine, options, SuperKernels(hardware.family))
    planned = to_schedule(plan, serial.schedule)
    runs = [Run("serial", serial.schedule, serial.trace), Run("expert", expert.schedule, expert.trace),
            Run("automatic", planned, simulate(planned, serial.machine))]
    picture = payload(runs, serial.machine, plan.lower_bound_us, plan.decisions)
    said = dataclasses.asdict(load)
    about = [("target", target), ("layout", str(parallel)), *((name, f"{value}") for name, value in said.items())]
    files = [timelines.write_page(picture, folder / "timeline.html", f"{model.title}: one die", about),
             timelines.write_trace(runs, serial.machine, folder / "trace.json"), folder / "plan.yaml"]
    files[2].write_text(to_yaml(plan, serial.schedule), encoding="utf-8")
    return {"runs": {run.name: run.trace.step_us for run in runs}, "lower_bound_us": plan.lower_bound_us,
            "files": [str(file) for file in files]}
