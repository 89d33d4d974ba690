"""What the simulator runs: tasks in streams, prefetches, SuperKernel regions.

A schedule is plain data. It is built from the analytic description of a network, from a lowered graph, or by a
scheduler; the simulator does not know which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAIN = "main"


@dataclass(frozen=True)
class Profile:
    """What one kernel takes on the cores it got, with the machine to itself.

    ``us``: duration. ``hbm_bytes``: bytes that it moves over HBM meanwhile. ``parts`` {bound: microseconds}: how long
    each resource (cube, vector, hbm, l2, link, launch) would keep it busy on its own; the largest is its bound.
    ``load_us``: how much shorter it would be if HBM took no time.
    """

    us: float
    hbm_bytes: float
    parts: tuple[tuple[str, float], ...]
    load_us: float = 0.0

    @property
    def bound(self) -> str:
        """The resource that keeps the kernel longest; the first of equals."""
        return max(self.parts, key=lambda part: part[1])[0]

    def part(self, name: str) -> float:
        """Microseconds of one resource."""
        return next((us for part, us in self.parts if part == name), 0.0)


class Load(Protocol):
    """A kernel with its sizes, ready to be timed."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""

    @property
    def cores(self) -> tuple[int, int]:
        """Cube and vector cores that it takes when nothing limits it."""

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        """Its `Profile` on so many cores with ``resident`` bytes of its weights in L2."""


@dataclass(frozen=True)
class Weight:
    """A weight that a kernel reads: ``name`` is equal where the memory is equal, ``bytes`` what is read of it."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Task:
    """One kernel of a schedule.

    ``name`` is unique. ``deps`` are names of tasks that must have ended. ``cores``: limit in cube and vector cores,
    None for the whole chip. ``super_kernel``: name of the region that it is fused into. ``label``: what it is for,
    for tables. ``layer``: the layer it belongs to.
    """

    name: str
    load: Load
    stream: str = MAIN
    deps: tuple[str, ...] = ()
    cores: tuple[int, int] | None = None
    weights: tuple[Weight, ...] = ()
    super_kernel: str | None = None
    label: str = ""
    layer: int | None = None


@dataclass(frozen=True)
class Prefetch:
    """Up to ``bytes`` of weight ``weight`` go into L2, from when task ``after`` has ended (`npu_prefetch`)."""

    weight: str
    bytes: float
    after: str


@dataclass(frozen=True)
class Schedule:
    """``tasks`` in program order, which is the order within each stream; ``graphs``: graphs launched by the host."""

    tasks: tuple[Task, ...]
    prefetches: tuple[Prefetch, ...] = ()
    graphs: int = 1

    def replace(self, tasks: Sequence[Task], prefetches: Sequence[Prefetch] | None = None) -> Schedule:
        """The same with other tasks."""
        more = self.prefetches if prefetches is None else tuple(prefetches)
        return Schedule(tuple(tasks), more, self.graphs)

    def serial(self) -> Schedule:
        """All on one stream in program order: no limits, no prefetch, no SuperKernel."""
        plain = [dataclasses.replace(t, stream=MAIN, cores=None, super_kernel=None) for t in self.tasks]
        return Schedule(tuple(plain), (), self.graphs)
