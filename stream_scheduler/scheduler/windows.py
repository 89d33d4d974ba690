"""Windows of a layer in which streams run side by side, and their core limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cannopy.stream_scheduler.plan import Cores
from cannopy.stream_scheduler.scheduler import splits
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution, closure


@dataclass(frozen=True)
class Window:
    """Tasks by index, each of which may run at the same time as one of another stream of the window."""

    tasks: tuple[int, ...]
    streams: tuple[int, ...]


def beside(problem: Problem, solution: Solution) -> list[int]:
    """Bit masks of the tasks of other streams that nothing orders before or after each task."""
    above = whole_order(problem, solution)
    below = [0] * problem.size
    for i in range(problem.size):
        for j in _bits(above[i]):
            below[j] |= 1 << i
    everything = (1 << problem.size) - 1
    return [everything & ~(above[i] | below[i] | 1 << i) for i in range(problem.size)]


def whole_order(problem: Problem, solution: Solution) -> list[int]:
    """Bit masks of the tasks that data, streams or waits order before each one."""
    before = [list(p) for p in problem.preds]
    last: dict[int, int] = {}
    for i in solution.order:
        stream = solution.streams[i]
        if stream in last:
            before[i].append(last[stream])
        last[stream] = i
    for i, j in solution.waits:
        before[i].append(j)
    return closure(before, solution.order)


def windows(problem: Problem, solution: Solution) -> list[Window]:
    """The windows of ``solution`` in order."""
    masks = beside(problem, solution)
    left = [i for i in solution.order if masks[i]]
    found = []
    while left:
        group, grown = 0, masks[left[0]] | 1 << left[0]
        while grown != group:
            group = grown
            for i in _bits(group):
                grown |= masks[i]
        tasks = tuple(i for i in left if group >> i & 1)
        found.append(Window(tasks, tuple(sorted({solution.streams[i] for i in tasks}))))
        left = [i for i in left if not group >> i & 1]
    return found


def needs_limits(problem: Problem, window: Window, solution: Solution) -> bool:
    """Whether kernels of two streams that need all their cores at once may run at the same time there."""
    return len({solution.streams[i] for i in window.tasks if problem.meets[i]}) > 1


def legal(problem: Problem, solution: Solution) -> bool:
    """Whether each group of collectives stays on its stream, what may run at the same time fits the chip wherever it
    has to, and only kernels wait on which a wait can be put."""
    if not all(problem.waitable[i] for i, _ in solution.waits):
        return False
    groups: dict[str, set[int]] = {}
    for i, group in enumerate(problem.groups):
        if group is not None:
            groups.setdefault(group, set()).add(solution.streams[i])
    if any(streams != {problem.homes.get(group, min(streams))} for group, streams in groups.items()):
        return False
    masks = beside(problem, solution)
    return not any(_crowded(problem, solution, i, masks[i]) for i in range(problem.size) if masks[i])


def apart(problem: Problem, solution: Solution, i: int, j: int) -> bool:
    """Whether two kernels must not run at the same time. Two limits have to fit the chip together. One limit promises
    its kernel cores that what runs beside it must leave. Two kernels without limits queue for cores, unless both need
    all theirs at once."""
    cores = solution.cores[i], solution.cores[j]
    if cores[0] is not None and cores[1] is not None:
        return not _fit(problem, [cores[0], cores[1]])
    if cores == (None, None) and not (problem.meets[i] and problem.meets[j]):
        return False
    return not _fit(problem, [problem.used(i, cores[0]), problem.used(j, cores[1])])


def kept_apart(problem: Problem, solution: Solution) -> Solution:
    """``solution`` with a wait of the later kernel for the earlier one wherever two must not run at the same time and
    nothing orders them."""
    masks = beside(problem, solution)
    for n, i in enumerate(solution.order):
        while True:
            clashes = [j for j in solution.order[:n] if masks[i] >> j & 1 and apart(problem, solution, i, j)]
            if not clashes:
                break
            solution = dataclasses.replace(solution, waits=(*solution.waits, (i, clashes[-1])))
            masks = beside(problem, solution)
    return solution


def serial(problem: Problem) -> Solution:
    """Graph order on the main stream, except for what is pinned or has its home elsewhere: that waits where it has
    to."""
    return kept_apart(problem, problem.serial())


def _crowded(problem: Problem, solution: Solution, i: int, mask: int) -> bool:
    """Whether ``i`` and what may run beside it are too many: each with it, or where limits are used the largest of
    every stream together."""
    most: dict[int, Cores] = {}
    limited = solution.cores[i] is not None
    for j in _bits(mask):
        if apart(problem, solution, i, j):
            return True
        limit = solution.cores[j]
        limited = limited or limit is not None
        old, new = most.get(solution.streams[j], (0, 0)), limit or problem.used(j, None)
        most[solution.streams[j]] = max(old[0], new[0]), max(old[1], new[1])
    own = solution.cores[i] or problem.used(i, None)
    return limited and len(most) > 1 and not _fit(problem, [own, *most.values()])


def _fit(problem: Problem, used: Sequence[Cores]) -> bool:
    return (sum(c for c, _ in used) <= problem.machine.cube_cores
            and sum(v for _, v in used) <= problem.machine.vector_cores)


def limited(problem: Problem, solution: Solution, forced: bool = False) -> tuple[Solution, float]:
    """``solution`` with the best core limits that were found, window by window, and its time; without any where that is
    faster, allowed and limits are not ``forced``. Infinite time: there is no legal choice."""
    current = solution
    for window in windows(problem, solution):
        best, best_us = current, math.inf
        if not forced and not needs_limits(problem, window, solution):
            best_us = problem.time(current)
        for split in _splits(problem, len(window.streams)):
            tried = _with(problem, current, window, split)
            us = problem.time(tried)
            if us < best_us - 1e-9:
                best, best_us = tried, us
        current = best
    return (current, problem.time(current)) if legal(problem, current) else (current, math.inf)


def _splits(problem: Problem, streams: int) -> Sequence[tuple[Cores, ...]]:
    find = splits.half if problem.options.split == "half" else splits.splits
    return find(problem.machine, streams)


def _with(problem: Problem, solution: Solution, window: Window, split: tuple[Cores, ...]) -> Solution:
    cores = list(solution.cores)
    for i in window.tasks:
        cores[i] = split[window.streams.index(solution.streams[i])]
    return problem.pinned(dataclasses.replace(solution, cores=tuple(cores)))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
