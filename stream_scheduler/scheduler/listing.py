"""Priority list scheduling of one layer over streams and core pools.

Kernels are placed one by one, each at the earliest time at which its inputs are there, a stream is free and its cores
are free; a later one may fill a hole that earlier ones left. Lists that are better than the first one are found by
justification: the schedule is shifted to the right as far as it goes, then to the left, the order of the ends and of
the starts being the new lists. The longest kernels of side streams are also tried at later positions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cannopy.stream_scheduler.plan import Cores
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution

_TINY = 1e-9


@dataclass
class Layout:
    """Start and end of each task and its stream, by index."""

    start: list[float]
    end: list[float]
    streams: list[int]

    @property
    def us(self) -> float:
        """End of the last task."""
        return max(self.end)


_Item = tuple[float, float, int, int, int]
"""Start, end, cube cores, vector cores and stream of a task that is placed."""


@dataclass
class _Line:
    """What is placed so far: tasks by end, and what each takes."""

    pools: tuple[int, int]
    gap: float
    ends: list[float] = field(default_factory=list)
    items: list[_Item] = field(default_factory=list)

    def add(self, start: float, end: float, cube: int, vector: int, stream: int) -> None:
        at = bisect.bisect_right(self.ends, end)
        self.ends.insert(at, end)
        self.items.insert(at, (start, end, cube, vector, stream))

    def earliest(self, after: float, us: float, cube: int, vector: int, stream: int) -> float:
        """First time from ``after`` at which ``stream`` and the cores are free for ``us``."""
        time, gap, cubes, vectors = after, self.gap, *self.pools
        while True:
            start, end = time + _TINY, time + us - _TINY
            beside: list[_Item] = []
            next_, used_cube, used_vector = None, cube, vector
            for item in self.items[bisect.bisect_right(self.ends, time - gap + _TINY):]:
                if item[4] == stream and item[0] - gap < end and item[1] + gap > start:
                    next_ = item[1] + gap
                    break
                if item[0] < end and item[1] > start:
                    beside.append(item)
                    used_cube += item[2]
                    used_vector += item[3]
            if next_ is None:
                if used_cube <= cubes and used_vector <= vectors:
                    return time
                next_ = self._crowded(beside, time, cube, vector)
                if next_ is None:
                    return time
            time = max(next_, time + _TINY)

    def _crowded(self, beside: list[_Item], start: float, cube: int, vector: int) -> float | None:
        """When the first of ``beside`` ends that leaves too few cores at some moment from ``start`` on; None when they
        suffice at every moment."""
        for moment in sorted({start, *(b[0] for b in beside if b[0] > start)}):
            there = [b for b in beside if b[0] <= moment + _TINY and b[1] > moment + _TINY]
            if (cube and sum(b[2] for b in there) + cube > self.pools[0]) or (
                    vector and sum(b[3] for b in there) + vector > self.pools[1]):
                return min(b[1] for b in there if (cube and b[2]) or (vector and b[3]))
        return None


class Lister:
    """Lists of one problem on ``count`` streams with durations ``us`` and cores ``cores`` of the tasks."""

    def __init__(self, problem: Problem, count: int, limited: bool = False) -> None:
        self.problem, self.count = problem, count
        self.us, self.cores = list(problem.us), list(problem.cores)
        self.allowed = [tuple(problem.streams_of(i, count, limited)) for i in range(problem.size)]

    def place(self, ranks: Sequence[float], reverse: bool = False, most: float = math.inf) -> Layout:
        """Tasks in the order of ``ranks``, smallest first, as far as precedence allows. ``reverse``: of the mirrored
        problem, in which everything runs backwards. A layout that is sure to get longer than ``most`` is given up, and
        its length is infinite."""
        p, machine = self.problem, self.problem.machine
        preds, succs = (p.succs, p.preds) if reverse else (p.preds, p.succs)
        line = _Line((machine.cube_cores, machine.vector_cores), machine.gap_us)
        layout = Layout([0.0] * p.size, [0.0] * p.size, [0] * p.size)
        missing = [len(before) for before in preds]
        ready = sorted((ranks[i], i) for i in range(p.size) if not missing[i])
        limits = None if math.isinf(most) else self._latest(most)
        while ready:
            _, i = ready.pop(0)
            self._put(i, preds[i], line, layout)
            if limits is not None and layout.end[i] > limits[i]:
                layout.end[i] = math.inf
                break
            for j in succs[i]:
                missing[j] -= 1
                if not missing[j]:
                    bisect.insort(ready, (ranks[j], j))
        return layout

    def _put(self, i: int, before: Sequence[int], line: _Line, layout: Layout) -> None:
        """Place task ``i``: on the stream where it starts first, of equals that of the input that comes last."""
        machine, (cube, vector) = self.problem.machine, self.cores[i]
        gap, event, us = machine.gap_us, machine.event_us, self.us[i]
        inputs = [(layout.end[j], layout.streams[j]) for j in before]
        home = max(inputs, key=lambda one: one[0])[1] if inputs else 0
        best = None
        for stream in self.allowed[i]:
            ready = gap
            for end, other in inputs:
                ready = max(ready, end + gap if other == stream else end + event + gap)
            time = line.earliest(ready, us, cube, vector, stream)
            key = (time, stream != home, stream)
            if best is None or key < best:
                best = key
        if best is None:
            raise ValueError(f"task {self.problem.tasks[i].name} has no stream")
        time, _, stream = best
        layout.start[i], layout.end[i], layout.streams[i] = time, time + self.us[i], stream
        line.add(time, time + self.us[i], cube, vector, stream)

    def set(self, i: int, limit: Cores | None) -> None:
        """Give task ``i`` at most ``limit`` cores."""
        cores = self.problem.used(i, limit)
        self.cores[i], self.us[i] = cores, self.problem.us_on(i, cores)

    def improved(self, rounds: int, most: float = math.inf) -> Layout:
        """The list by longest chains, justified up to ``rounds`` times unless it is longer than ``most``."""
        found = self.place([-tail for tail in self._tails()], most=most)
        if found.us > most:
            return found
        for _ in range(rounds):
            right = self.place([-end for end in found.end], reverse=True)
            left = self.place([-end for end in right.end], most=found.us)
            if left.us >= found.us - _TINY:
                break
            found = left
        return found

    def best(self) -> Layout:
        """The shortest layout found."""
        return self._delayed(self.improved(4))

    @property
    def chain_us(self) -> float:
        """Microseconds of the longest chain, which no layout is shorter than."""
        return max(self._tails())

    def _latest(self, most: float) -> list[float]:
        """The latest end of each task for the chain behind it to end by ``most``."""
        gap = self.problem.machine.gap_us
        return [most - tail + us + gap + _TINY for tail, us in zip(self._tails(), self.us, strict=True)]

    def _tails(self) -> list[float]:
        p = self.problem
        found = [0.0] * p.size
        for i in reversed(range(p.size)):
            found[i] = self.us[i] + p.machine.gap_us + max((found[j] for j in p.succs[i]), default=0.0)
        return found

    def _delayed(self, found: Layout, most: int = 6) -> Layout:
        """As ``found``, with side kernels one by one behind a kernel that they came before."""
        p = self.problem
        side = sorted((i for i in range(p.size) if found.streams[i]), key=lambda i: (-self.us[i], i))[:most]
        for i in side:
            later = sorted({found.start[j] for j in range(p.size) if found.start[j] > found.start[i]})[:most]
            for moment in later:
                ranks = list(found.start)
                ranks[i] = moment + _TINY
                tried = self.place(ranks, most=found.us)
                if tried.us < found.us - _TINY:
                    found = tried
        return found


def solution_of(problem: Problem, layout: Layout, hold: bool) -> Solution:
    """``layout`` as a solution. ``hold``: a kernel that was kept back by the cores of another stream waits for the last
    kernel of that stream which ended before it."""
    order = tuple(sorted(range(problem.size), key=lambda i: (layout.start[i], i)))
    waits = tuple(_holds(problem, layout, order)) if hold else ()
    solution = Solution(order, tuple(layout.streams), (None,) * problem.size, waits)
    return problem.pinned(solution)


def _holds(problem: Problem, layout: Layout, order: tuple[int, ...]) -> list[tuple[int, int]]:
    machine = problem.machine
    last: dict[int, int] = {}
    waits = []
    for i in order:
        stream = layout.streams[i]
        ready = machine.gap_us
        before = [*problem.preds[i], *([last[stream]] if stream in last else [])]
        for j in before:
            ready = max(ready, layout.end[j] + (0.0 if layout.streams[j] == stream else machine.event_us)
                        + machine.gap_us)
        last[stream] = i
        if layout.start[i] <= ready + _TINY:
            continue
        others = [j for j in order if layout.streams[j] != stream and layout.end[j] <= layout.start[i] + _TINY
                  and any(a and b for a, b in zip(problem.cores[i], problem.cores[j], strict=True))]
        if others:
            waits.append((i, max(others, key=lambda j: (layout.end[j], j))))
    return waits
