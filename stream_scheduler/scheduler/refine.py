"""Core limits kernel by kernel, for a layer whose streams are decided.

Starts from the limits of the windows, or from the narrowest that each kernel hardly notices. Changes one kernel at a
time to another limit or to none, longest kernels first, then pairs that run side by side, and keeps what shortens the
list schedule. Kernels that the new schedule keeps apart and that would not fit beside each other wait for one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from cannopy.stream_scheduler.plan import Cores
from cannopy.stream_scheduler.scheduler.listing import Layout, Lister
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution
from cannopy.stream_scheduler.scheduler.splits import limits, splits
from cannopy.stream_scheduler.scheduler.windows import kept_apart

PASSES = 3
MOST_MOVES = 400
"""Changes that are tried for one layer."""
HOPELESS = 1.005
"""A list that much longer than the best one is not worth improving."""
_TINY = 1e-6


def narrow(problem: Problem, solution: Solution, slack: float) -> Solution:
    """``solution`` with each kernel on the fewest cores on which it takes no more than ``slack`` times as long."""
    found: list[Cores | None] = []
    for i in range(problem.size):
        fits = (cores for cores in limits(problem.machine) if problem.used(i, cores) != problem.cores[i]
                and problem.us_on(i, problem.used(i, cores)) <= slack * problem.us[i])
        found.append(next(fits, None))
    return problem.pinned(dataclasses.replace(solution, cores=tuple(found)))


def refined(problem: Problem, solution: Solution, streams: int, settled: bool) -> Solution:
    """``solution`` with better limits by the list scheduler, or an equal one. ``settled``: every group of collectives
    stays on the stream that it is on; otherwise they may wander, and whether they end up where they have to be is for
    the caller to check."""
    search = _Search(problem, solution, streams, settled)
    for _ in range(PASSES):
        before = search.found.us
        for i in sorted(range(problem.size), key=lambda i: (-problem.us[i], i)):
            for cores in search.choices[i]:
                search.attempt({i: cores})
        for i, j in search.neighbours():
            for split in splits(problem.machine, 2):
                search.attempt(dict(zip((i, j), split, strict=True)))
        if search.found.us > before - _TINY:
            break
    return ordered(problem, search.found, search.limit)


class _Search:
    """The limits so far and the layout that they give."""

    def __init__(self, problem: Problem, solution: Solution, streams: int, settled: bool) -> None:
        self.problem = problem
        self.lister = Lister(problem, streams, limited=True)
        self.choices = [_choices(problem, i) for i in range(problem.size)]
        self.limit = list(solution.cores)
        homes = {group: solution.streams[i] for i, group in enumerate(problem.groups)}
        for i, group in enumerate(problem.groups):
            if group is not None:
                anywhere = problem.streams_of(i, streams, True) if problem.alone(i) else tuple(range(streams))
                self.lister.allowed[i] = (homes[group],) if settled else tuple(anywhere)
            self.lister.set(i, self.limit[i])
        self.found = self.lister.improved(1)
        self.left = MOST_MOVES
        self.tried = {tuple(self.limit)}

    def attempt(self, change: Mapping[int, Cores | None]) -> None:
        """Keep ``change`` {task: limit} if the layout gets shorter."""
        change = {i: cores if cores in self.choices[i] else self.choices[i][0] for i, cores in change.items()}
        if not self.left:
            return
        limit = list(self.limit)
        for i, cores in change.items():
            limit[i] = cores
        if tuple(limit) in self.tried:
            return
        self.tried.add(tuple(limit))
        self.left -= 1
        for i, cores in change.items():
            self.lister.set(i, cores)
        least = self.found.us - _TINY
        tried = self.lister.improved(1, HOPELESS * self.found.us) if self.lister.chain_us < least else None
        if tried is not None and tried.us < least:
            self.found, self.limit = tried, limit
            return
        for i in change:
            self.lister.set(i, self.limit[i])

    def neighbours(self) -> list[tuple[int, int]]:
        """Pairs of kernels that run at the same time and want the same cores, longest first."""
        found, p = self.found, self.problem
        pairs = [(i, j) for i in range(p.size) for j in range(i)
                 if min(found.end[i], found.end[j]) > max(found.start[i], found.start[j]) + _TINY
                 and any(a and b for a, b in zip(p.cores[i], p.cores[j], strict=True))]
        return sorted(pairs, key=lambda pair: (-min(p.us[i] for i in pair), pair))


def ordered(problem: Problem, layout: Layout, limit: Sequence[Cores | None]) -> Solution:
    """``layout`` with waits between kernels of two streams that it keeps apart and that do not fit together."""
    order = tuple(sorted(range(problem.size), key=lambda i: (layout.start[i], i)))
    return kept_apart(problem, problem.pinned(Solution(order, tuple(layout.streams), tuple(limit))))


def _choices(problem: Problem, i: int) -> list[Cores | None]:
    """No limit, and the limits that the kernel would notice, widest first; what the user pinned alone."""
    pin = problem.pins[i]
    if pin is not None and pin.cores is not None:
        return [None if pin.cores == "whole" else pin.cores]
    cube, vector = problem.cores[i]
    found: list[Cores | None] = [None]
    for c, v in reversed(limits(problem.machine)):
        if (cube and c < cube) or (vector and v < vector):
            found.append((c, v))
    return found
