"""A solved layer followed by the next one: where prefetches and SuperKernel regions are tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cannopy.stream_scheduler.scheduler.costs import Perturbation, Resident
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution, closure
from cannopy.stream_scheduler.simulator import (
    Load,
    Machine,
    Prefetch,
    Schedule,
    ScheduleError,
    Task,
    Trace,
    duration,
    simulate,
)


@dataclass(frozen=True)
class Fetch:
    """A prefetch by place: ``bytes`` of weight ``weight`` (a number) of task ``target``, once task ``after`` has ended.
    Places count through the stretch; ``after`` is in its first layer."""

    target: int
    weight: int
    bytes: int
    after: int


@dataclass(frozen=True)
class Stretch:
    """``first`` and, if there is one, ``then``, each a problem with its solution. ``warm`` {task of the first: bytes}:
    weights that an earlier layer has prefetched."""

    first: tuple[Problem, Solution]
    then: tuple[Problem, Solution] | None
    warm: tuple[tuple[int, int], ...] = ()
    machine: Machine = field(kw_only=True)
    _times: dict[Hashable, float] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    _loaded: dict[Perturbation | None, list[Task]] = field(default_factory=dict, repr=False, compare=False,
                                                           kw_only=True)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of both by place, in graph order, each with its stream and limit; dependencies inside only."""
        found = _placed(*self.first)
        if self.then is not None:
            found += _placed(*self.then, since={task.name for task in found})
        return tuple(found)

    @property
    def size(self) -> int:
        """Tasks of the first layer."""
        return self.first[0].size

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Places in program order."""
        later = tuple(self.size + i for i in self.then[1].order) if self.then is not None else ()
        return self.first[1].order + later

    @cached_property
    def before(self) -> list[int]:
        """Bit masks of the tasks that data, streams or waits order before each one."""
        index = {task.name: i for i, task in enumerate(self.tasks)}
        before = [[index[name] for name in task.deps] for task in self.tasks]
        last: dict[str, int] = {}
        for i in self.order:
            stream = self.tasks[i].stream
            if stream in last:
                before[i].append(last[stream])
            last[stream] = i
        return closure(before, self.order)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What each task costs, with the weights that are there already."""
        loads: list[Load] = [task.load for task in self.tasks]
        for i, amount in self.warm:
            loads[i] = Resident(loads[i], float(amount))
        return tuple(loads)

    def run(self, fetches: Sequence[Fetch] = ()) -> Trace | None:
        """Simulate with these prefetches; None when it hangs."""
        try:
            return simulate(self._schedule(fetches, (), None), self.machine)
        except ScheduleError:
            return None

    def _schedule(self, fetches: Sequence[Fetch], fused: Sequence[int | None], cost: Perturbation | None) -> Schedule:
        """With these prefetches, SuperKernel regions of the first layer, and costs."""
        if cost not in self._loaded:
            loads = cost.loads(self.loads) if cost else self.loads
            self._loaded[cost] = [dataclasses.replace(self.tasks[i], load=loads[i]) for i in self.order]
        placed = list(self._loaded[cost])
        for n, i in enumerate(self.order):
            if i < len(fused) and fused[i] is not None:
                placed[n] = dataclasses.replace(placed[n], super_kernel=str(fused[i]))
        prefetches = tuple(
            Prefetch(self.tasks[f.target].weights[f.weight].name, float(f.bytes), self.tasks[f.after].name)
            for f in fetches)
        return Schedule(tuple(placed), prefetches, 0)

    def time(self, fetches: Sequence[Fetch] = (), fused: Sequence[int | None] = (),
             cost: Perturbation | None = None) -> float:
        """Microseconds; infinite when it hangs."""
        key = (tuple(fetches), tuple(fused) if any(region is not None for region in fused) else (), cost)
        if key not in self._times:
            try:
                machine = cost.machine(self.machine) if cost else self.machine
                self._times[key] = duration(self._schedule(fetches, fused, cost), machine)
            except ScheduleError:
                self._times[key] = math.inf
        return self._times[key]


def _placed(problem: Problem, solution: Solution, since: frozenset[str] | set[str] = frozenset()) -> list[Task]:
    schedule = {task.name: task for task in problem.schedule(solution).tasks}
    found = []
    for task in problem.tasks:
        placed = schedule[task.name]
        earlier = tuple(name for name in task.deps if name in since)
        found.append(dataclasses.replace(placed, deps=placed.deps + earlier, super_kernel=None))
    return found
