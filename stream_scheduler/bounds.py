"""Times that no schedule of the same kernels can beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cannopy.stream_scheduler.simulator.machine import Machine
from cannopy.stream_scheduler.simulator.schedule import Schedule

POOLS = ("cube", "vector")


@dataclass(frozen=True)
class Bounds:
    """``critical_path_us``: longest chain of dependencies, every kernel on the whole chip with its weights in L2 and
    without its own start, as if all were one SuperKernel. ``resources`` {cube, vector, hbm, link: microseconds}: all
    work of one kind at the full rate of the chip. ``host_us``: graph launches."""

    critical_path_us: float
    resources: Mapping[str, float]
    host_us: float

    @property
    def us(self) -> float:
        """The larger of critical path and busiest resource, and the graph launches."""
        return max(self.critical_path_us, *self.resources.values()) + self.host_us

    @property
    def bound(self) -> str:
        """What the larger one is: ``critical path`` or a resource."""
        resource = max(self.resources, key=lambda name: self.resources[name])
        return resource if self.resources[resource] > self.critical_path_us else "critical path"


def bounds(schedule: Schedule, machine: Machine) -> Bounds:
    """Bounds of ``schedule``; streams, core limits, prefetches and regions play no part in them."""
    ends: dict[str, float] = {}
    resources = {"cube": 0.0, "vector": 0.0, "hbm": 0.0, "link": 0.0}
    for task in schedule.tasks:
        cube, vector = task.load.cores
        weights = sum(weight.bytes for weight in task.weights)
        alone = task.load.profile(cube, vector, 0.0)
        warm = dict(task.load.profile(cube, vector, weights).parts)
        start = max((ends[name] for name in task.deps), default=0.0)
        us = task.load.profile(cube, vector, weights).us - min(machine.saved_us, warm.get("launch", 0.0))
        ends[task.name] = start + us
        parts = dict(alone.parts)
        for pool, used, whole in zip(POOLS, (cube, vector), (machine.cube_cores, machine.vector_cores), strict=True):
            resources[pool] += parts.get(pool, 0.0) * used / whole
        resources["link"] += parts.get("link", 0.0)
        resources["hbm"] += alone.hbm_bytes / max(machine.hbm_peak, machine.hbm_rate)
    return Bounds(max(ends.values(), default=0.0), resources, schedule.graphs * machine.graph_us)
