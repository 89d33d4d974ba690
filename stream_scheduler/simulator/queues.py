"""The order of a schedule: who waits for whom, and which runs of tasks are one SuperKernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from cannopy.stream_scheduler.simulator.machine import Machine
from cannopy.stream_scheduler.simulator.schedule import Schedule, Task


class ScheduleError(ValueError):
    """A schedule that cannot run: unknown or repeated names, cores that the chip does not have, or a hang."""


@dataclass
class Queues:
    """Static facts about a schedule, by index of the task.

    ``before``: the preceding task of the same stream, None for the first. ``after``: tasks that wait for this one.
    ``open``: number of tasks that this one waits for. ``cores``: what it takes from the pools. ``region``: index of the
    first task of its SuperKernel, None outside; ``last``: whether it is the last one there.
    """

    tasks: tuple[Task, ...]
    index: dict[str, int]
    before: list[int | None]
    after: list[list[int]]
    open: list[int]
    cores: list[tuple[int, int]]
    region: list[int | None] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)


def arrange(schedule: Schedule, machine: Machine) -> Queues:
    """The `Queues` of ``schedule``; `ScheduleError` for what cannot be run on ``machine``."""
    tasks = schedule.tasks
    index = {task.name: i for i, task in enumerate(tasks)}
    if len(index) != len(tasks):
        names = [task.name for task in tasks]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleError(f"two tasks are named {twice!r}; names of tasks are unique")
    heads: dict[str, int] = {}
    before: list[int | None] = []
    after: list[list[int]] = [[] for _ in tasks]
    count = []
    for i, task in enumerate(tasks):
        previous = heads.get(task.stream)
        heads[task.stream] = i
        before.append(previous)
        waits = {_index(index, name, task) for name in task.deps} | ({previous} if previous is not None else set())
        for j in waits:
            after[j].append(i)
        count.append(len(waits))
    queues = Queues(tasks, index, before, after, count, [_cores(task, machine) for task in tasks])
    for prefetch in schedule.prefetches:
        if prefetch.after not in index:
            raise ScheduleError(f"the prefetch of {prefetch.weight} waits for {prefetch.after!r}, which is no task")
    _regions(queues)
    return queues


def _index(index: dict[str, int], name: str, task: Task) -> int:
    if name not in index:
        raise ScheduleError(f"task {task.name!r} waits for {name!r}, which is no task")
    return index[name]


def _cores(task: Task, machine: Machine) -> tuple[int, int]:
    """Cores of the kernel, or of the chip, within its limit."""
    cube, vector = task.load.cores
    limit = task.cores or (machine.cube_cores, machine.vector_cores)
    if limit[0] > machine.cube_cores or limit[1] > machine.vector_cores:
        raise ScheduleError(f"task {task.name!r}: {limit[0]} cube and {limit[1]} vector cores, the chip has "
                            f"{machine.cube_cores} and {machine.vector_cores}")
    if (cube and limit[0] < 1) or (vector and limit[1] < 1):
        raise ScheduleError(f"task {task.name!r} needs cores of a kind that its limit {limit} does not leave it")
    return min(cube, limit[0]), min(vector, limit[1])


def _regions(queues: Queues) -> None:
    """Consecutive tasks of one stream with one SuperKernel name; the first one takes the cores of the largest."""
    size = len(queues.tasks)
    queues.region, queues.last = [None] * size, [False] * size
    open_: dict[str, int] = {}
    for i, task in enumerate(queues.tasks):
        previous = open_.pop(task.stream, None)
        if task.super_kernel is None:
            continue
        same = previous is not None and queues.tasks[previous].super_kernel == task.super_kernel
        first = queues.region[previous] if same and previous is not None else i
        queues.region[i] = first
        queues.last[i] = True
        open_[task.stream] = i
        if same and previous is not None and first is not None:
            queues.last[previous] = False
            wide, own = queues.cores[first], queues.cores[i]
            queues.cores[first] = (max(wide[0], own[0]), max(wide[1], own[1]))
