"""A plan applied to the schedule of its graph."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping

from cannopy.stream_scheduler.plan.model import Placement, Plan, PlanError
from cannopy.stream_scheduler.simulator import Prefetch, Schedule, Task


def serial_plan(schedule: Schedule, target: str) -> Plan:
    """Every kernel on the main stream in graph order."""
    return Plan(target, tuple(Placement(task.name) for task in schedule.tasks))


def to_schedule(plan: Plan, schedule: Schedule) -> Schedule:
    """The tasks of ``schedule`` (on one stream, in graph order) as ``plan`` places them, ready to be simulated.

    A region with stream-fusion is simulated as single kernels: what it gains was never published, and what it costs is
    not more. `PlanError` names a kernel that is unknown, missing or placed twice, and the nearest known name.
    """
    tasks = {task.name: task for task in schedule.tasks}
    _check_names(plan, tasks)
    waits: dict[str, list[str]] = {}
    for wait in plan.waits:
        waits.setdefault(wait.node, []).append(wait.on)
    regions = {region.name: region for region in plan.regions}
    placed = []
    for p in plan.placements:
        task = tasks[p.node]
        fused = p.super_kernel is not None and not regions[p.super_kernel].stream_fusion
        deps = tuple(dict.fromkeys((*task.deps, *waits.get(p.node, ()))))
        placed.append(dataclasses.replace(task, stream=p.stream, cores=p.cores, deps=deps,
                                          super_kernel=p.super_kernel if fused else None))
    prefetches = [Prefetch(p.weight, float(p.bytes), p.after) for p in plan.prefetches]
    return schedule.replace(placed, prefetches)


def _check_names(plan: Plan, tasks: dict[str, Task]) -> None:
    """`PlanError` unless every name in ``plan`` is known and every kernel is placed once."""
    seen: set[str] = set()
    for p in plan.placements:
        known("kernel", p.node, tasks)
        if p.node in seen:
            raise PlanError(f"kernel {p.node!r} is placed twice; a plan has each kernel once")
        seen.add(p.node)
        if p.super_kernel is not None:
            known("SuperKernel region", p.super_kernel, [region.name for region in plan.regions])
    if missing := [name for name in tasks if name not in seen]:
        raise PlanError(f"the plan does not place {len(missing)} of {len(tasks)} kernels of the graph, the first is "
                        f"{missing[0]!r}; a plan has every kernel, or pins only")
    for wait in plan.waits:
        known("kernel", wait.node, tasks)
        known("kernel", wait.on, tasks)
    for fetch in plan.prefetches:
        known("kernel", fetch.after, tasks)
        known("kernel", fetch.before, tasks)
        known(f"weight of {fetch.before}", fetch.weight, [w.name for w in tasks[fetch.before].weights])


def known(kind: str, name: str, names: Iterable[str], where: str = "") -> None:
    """`PlanError`, after ``where``, with the nearest of ``names`` unless ``name`` is among them."""
    if isinstance(names, Mapping) and name in names:
        return
    every = list(names)
    if name in every:
        return
    close = difflib.get_close_matches(name, every, n=1, cutoff=0.0)
    place = f"{where}: " if where else ""
    hint = f"did you mean {close[0]!r}?" if close else "there is none"
    raise PlanError(f"{place}unknown {kind} {name!r}; {hint}")
