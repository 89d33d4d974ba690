"""One layer as a scheduling problem: precedence, durations, core pools; and what a solution of it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from cannopy.stream_scheduler.plan import Cores, Pin, PlanError
from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.scheduler.collectives import group_of, meets
from cannopy.stream_scheduler.scheduler.costs import Perturbation
from cannopy.stream_scheduler.scheduler.options import ScheduleOptions
from cannopy.stream_scheduler.simulator import Load, Machine, Prefetch, Schedule, ScheduleError, Task, duration


@dataclass(frozen=True)
class Solution:
    """How the tasks of a problem run, by index: ``order`` of all of them, ``streams`` by number (0 is main), ``cores``
    limits, ``waits`` (task, what it waits for) beyond the data, ``fused``: number of its SuperKernel region or None.
    """

    order: tuple[int, ...]
    streams: tuple[int, ...]
    cores: tuple[Cores | None, ...]
    waits: tuple[tuple[int, int], ...] = ()
    fused: tuple[int | None, ...] = ()

    @property
    def stream_count(self) -> int:
        """Streams that it uses."""
        return len(set(self.streams))

    @property
    def limited(self) -> bool:
        """Whether any task has a core limit."""
        return any(cores is not None for cores in self.cores)


class Problem:
    """The tasks of a layer. Dependencies on other layers are met at time 0. ``homes`` {group of collectives: number of
    the stream that it is on in other layers}."""

    def __init__(self, tasks: Sequence[Task], machine: Machine, options: ScheduleOptions,
                 homes: Mapping[str, int] = MappingProxyType({})) -> None:
        self.homes = homes
        self._times: dict[tuple[Solution, Perturbation | None], float] = {}
        self.tasks, self.machine, self.options = tuple(tasks), machine, options
        self.size = len(self.tasks)
        index = {task.name: i for i, task in enumerate(self.tasks)}
        self.preds = [sorted({index[d] for d in task.deps if d in index}) for task in self.tasks]
        self.succs: list[list[int]] = [[] for _ in self.tasks]
        for i, before in enumerate(self.preds):
            for j in before:
                self.succs[j].append(i)
        self.cores = [task.load.cores for task in self.tasks]
        self.us = [task.load.profile(*task.load.cores, 0.0).us for task in self.tasks]
        self.groups = [group_of(task, options.groups) for task in self.tasks]
        self.meets = [meets(task, options.groups) for task in self.tasks]
        self.waitable = [task.name not in options.cannot_wait for task in self.tasks]
        pins = {pin.node: pin for pin in options.pins.nodes}
        self.pins: list[Pin | None] = [pins.get(task.name) for task in self.tasks]

    def us_on(self, i: int, cores: Cores) -> float:
        """Microseconds of task ``i`` on ``cores``."""
        return self.us[i] if cores == self.cores[i] else self.tasks[i].load.profile(*cores, 0.0).us

    def used(self, i: int, limit: Cores | None) -> Cores:
        """Cores that task ``i`` takes under ``limit``."""
        cube, vector = self.cores[i]
        return (cube, vector) if limit is None else (min(cube, limit[0]), min(vector, limit[1]))

    @cached_property
    def ancestors(self) -> list[int]:
        """Bit masks of the tasks that each one needs, directly or not."""
        return closure(self.preds, range(self.size))

    @cached_property
    def tails(self) -> list[float]:
        """Microseconds from the start of each task to the end of the longest chain behind it."""
        gap = self.machine.gap_us
        found = [0.0] * self.size
        for i in reversed(range(self.size)):
            found[i] = self.us[i] + gap + max((found[j] for j in self.succs[i]), default=0.0)
        return found

    @cached_property
    def chain(self) -> list[int]:
        """The longest chain, in order; the first of equals."""
        found: list[int] = []
        open_: Sequence[int] = [i for i in range(self.size) if not self.preds[i]]
        while open_:
            found.append(max(open_, key=lambda i: (self.tails[i], -i)))
            open_ = self.succs[found[-1]]
        return found

    @cached_property
    def has_branches(self) -> bool:
        """Whether any two tasks could run at the same time."""
        return any(bin(self.ancestors[i]).count("1") < i for i in range(self.size))

    def streams_of(self, i: int, count: int, limited: bool) -> range | tuple[int, ...]:
        """Streams that task ``i`` may run on. What nothing of the layer reads is on the main stream, so that every
        side stream is joined, and what cannot wait; without core limits collectives share the main stream, but for
        groups that are elsewhere in other layers. A user's pin comes first."""
        pin = self.pins[i]
        if pin is not None and pin.stream is not None:
            return (self._pinned_stream(i, pin.stream),)
        group = self.groups[i]
        if group is not None and group in self.homes:
            return (self.homes[group],)
        if not self.succs[i] or not self.waitable[i] or (self.meets[i] and not limited):
            return (0,)
        return range(count)

    def alone(self, i: int) -> bool:
        """Whether one stream is possible for task ``i`` whatever the others do: a pin, nothing reads it, or it cannot
        wait."""
        pin = self.pins[i]
        return not self.succs[i] or not self.waitable[i] or (pin is not None and pin.stream is not None)

    def _pinned_stream(self, i: int, name: str) -> int:
        """The number of the stream that task ``i`` is pinned to; `PlanError` when it cannot be there."""
        names = [stream_name(number) for number in range(self.options.streams)]
        known(f"stream for {self.tasks[i].name}", name, names, f"{self.options.streams} streams are allowed")
        if name != names[0] and not self.succs[i]:
            raise PlanError(f"{self.tasks[i].name} is pinned to {name}, but nothing of its layer reads it: the stream "
                            "would not be joined; leave it on main")
        return names.index(name)

    def serial(self) -> Solution:
        """Graph order on the main stream, except for what is pinned."""
        streams = tuple(self.streams_of(i, 1, False)[0] for i in range(self.size))
        return self.pinned(Solution(tuple(range(self.size)), streams, (None,) * self.size))

    def found_homes(self, solution: Solution) -> dict[str, int]:
        """The stream of each group of collectives in ``solution``."""
        return {group: solution.streams[i] for i, group in enumerate(self.groups) if group is not None}

    def pinned(self, solution: Solution) -> Solution:
        """``solution`` with the core limits that a user has pinned."""
        cores = list(solution.cores)
        for i, pin in enumerate(self.pins):
            if pin is not None and pin.cores is not None:
                cores[i] = None if pin.cores == "whole" else pin.cores
        return Solution(solution.order, solution.streams, tuple(cores), solution.waits, solution.fused)

    def schedule(self, solution: Solution, loads: Sequence[Load] | None = None,
                 prefetches: Sequence[Prefetch] = ()) -> Schedule:
        """``solution`` for the simulator; ``loads`` replace those of the tasks."""
        waits: dict[int, list[int]] = {}
        for i, j in solution.waits:
            waits.setdefault(i, []).append(j)
        names = [task.name for task in self.tasks]
        placed = []
        for i in solution.order:
            task = self.tasks[i]
            deps = tuple(names[j] for j in (*self.preds[i], *waits.get(i, ())))
            region = solution.fused[i] if solution.fused else None
            placed.append(Task(task.name, loads[i] if loads else task.load, stream_name(solution.streams[i]), deps,
                               solution.cores[i], task.weights, None if region is None else str(region), task.label,
                               task.layer))
        return Schedule(tuple(placed), tuple(prefetches), 0)

    def time(self, solution: Solution, cost: Perturbation | None = None) -> float:
        """Microseconds that it takes, at the costs as they are or at ``cost``; infinite when it cannot run."""
        key = (solution, cost)
        if key not in self._times:
            loads = cost.loads([task.load for task in self.tasks]) if cost else None
            machine = cost.machine(self.machine) if cost else self.machine
            try:
                self._times[key] = duration(self.schedule(solution, loads), machine)
            except ScheduleError:
                self._times[key] = math.inf
        return self._times[key]


def closure(preds: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Bit masks of everything before each task; ``order`` has what a task needs before it."""
    found = [0] * len(preds)
    for i in order:
        for j in preds[i]:
            found[i] |= found[j] | 1 << j
    return found


def stream_name(number: int) -> str:
    """``main``, ``side1``, ``side2`` …"""
    return f"side{number}" if number else "main"
