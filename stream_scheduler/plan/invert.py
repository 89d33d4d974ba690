"""A placed schedule as a plan: how placements that were written by hand become plans."""

from __future__ import annotations

from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.keys import region_prefix
from cannopy.stream_scheduler.plan.model import Placement, Plan, PlannedPrefetch, SuperKernelRegion, Wait
from cannopy.stream_scheduler.plan.segments import segments
from cannopy.stream_scheduler.simulator import Schedule


def from_schedule(placed: Schedule, graph: Schedule, target: str, options: str = "") -> Plan:
    """The plan that makes ``placed`` out of ``graph``, which has the same kernels on one stream: the inverse of
    `to_schedule`. A prefetch is for the first kernel that reads the weight; regions have ``options``."""
    data = {task.name: set(task.deps) for task in graph.tasks}
    streams = {task.name: task.stream for task in placed.tasks}
    readers: dict[str, str] = {}
    waits = []
    for task in placed.tasks:
        known("kernel", task.name, data)
        waits += [Wait(task.name, on) for on in task.deps if on not in data[task.name]]
        for weight in task.weights:
            readers.setdefault(weight.name, task.name)
    fetches = []
    for fetch in placed.prefetches:
        known("weight", fetch.weight, readers)
        fetches.append(PlannedPrefetch(fetch.weight, int(fetch.bytes), fetch.after, readers[fetch.weight],
                                       streams[fetch.after]))
    names = _region_names(placed, graph)
    placements = tuple(Placement(t.name, t.stream, t.cores, names.get(t.super_kernel or "")) for t in placed.tasks)
    regions = tuple(SuperKernelRegion(name, options) for name in names.values())
    return Plan(target, placements, tuple(waits), tuple(fetches), regions)


def _region_names(placed: Schedule, graph: Schedule) -> dict[str, str]:
    """Names for the regions of ``placed``, numbered within each layer, so that like layers have like names; a region of
    several layers keeps its own."""
    parts = segments(graph.tasks)
    part_of = {task.name: n for n, part in enumerate(parts) for task in part.tasks}
    places: dict[str, set[int]] = {}
    for task in placed.tasks:
        if task.super_kernel is not None:
            places.setdefault(task.super_kernel, set()).add(part_of[task.name])
    names: dict[str, str] = {}
    count: dict[int, int] = {}
    for region, where in places.items():
        first = min(where)
        number = count[first] = count.get(first, -1) + 1
        names[region] = f"{region_prefix(parts[first])}sk{number}" if len(where) == 1 else region
    return names
