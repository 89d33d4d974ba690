"""Candidates for the streams of one layer, and the fastest of them by the simulator."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from cannopy.stream_scheduler.scheduler.branches import assigned, branches
from cannopy.stream_scheduler.scheduler.listing import Lister, solution_of
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution
from cannopy.stream_scheduler.scheduler.refine import narrow, refined
from cannopy.stream_scheduler.scheduler.windows import kept_apart, legal, limited
from cannopy.stream_scheduler.scheduler.windows import serial as serial_of

MOST_BRANCHES = 6
"""Branches that are tried as a whole on a side stream, the longest ones; set by us."""
REFINED = 4
SLACKS = (1.02, 1.3)
"""How much slower narrow limits may make each kernel, where limits start from them."""
_TINY = 1e-6


@dataclass(frozen=True)
class Found:
    """A solution and its simulated time."""

    solution: Solution
    us: float


def unlimited(problem: Problem, streams: int) -> Found:
    """The fastest of the lists on up to ``streams`` streams without core limits; one stream less where the last one
    wins no more than the threshold."""
    serial = serial_of(problem)
    best = Found(serial, problem.time(serial))
    if not problem.has_branches:
        return best
    for count in range(2, streams + 1):
        if problem.options.order == "graph":
            streams_of = Lister(problem, count).place(range(problem.size)).streams
            best = _better(problem, best, dataclasses.replace(problem.serial(), streams=tuple(streams_of)))
            continue
        layout = Lister(problem, count).best()
        for hold in (False, True):
            best = _better(problem, best, solution_of(problem, layout, hold))
    return _fewer_waits(problem, best)


def with_limits(problem: Problem, streams: int, start: Found, forced: bool = False) -> Found:
    """The fastest with core limits: those of ``start``'s windows, and branches on side streams of their own.
    ``forced``: the fastest that has limits, though it may be slower than ``start``."""
    if not problem.has_branches:
        return start
    best = Found(start.solution, math.inf) if forced else start
    if start.solution.stream_count > 1:
        best = _limited(problem, best, start.solution, forced)
    chosen: dict[int, int] = {}
    serial, keep = serial_of(problem), problem.options.order == "graph"
    here = Found(serial, math.inf if forced else problem.time(serial))
    for branch in branches(problem)[:MOST_BRANCHES]:
        tried = [({**chosen, **dict.fromkeys(branch.tasks, stream)}) for stream in range(1, streams)]
        results = [(option, _limited(problem, here, assigned(problem, option, graph), forced))
                   for option in tried for graph in ((True,) if keep else (False, True))]
        option, result = min(results, key=lambda r: r[1].us)
        if result.us < here.us - _TINY:
            chosen, here = option, result
    best = _chosen(problem, best, here)
    if problem.options.split == "search" and not keep and not math.isinf(best.us):
        best = _refined(problem, best, streams, forced)
    return start if math.isinf(best.us) else best


def _refined(problem: Problem, best: Found, streams: int, forced: bool) -> Found:
    """With limits kernel by kernel, where that wins more than `REFINED` times the threshold: they need more waits.
    ``forced``: not without any limit."""
    margin = problem.options.threshold * REFINED * best.us
    if best.us - max(problem.tails) <= margin:
        return best
    seeds = [best.solution, *(narrow(problem, best.solution, slack) for slack in SLACKS)]
    starts = [(seed, True) for seed in seeds]
    if any(group is not None for group in problem.groups):
        starts.append((best.solution, False))
    found = best
    for seed, settled in starts:
        solution = refined(problem, seed, streams, settled)
        if (forced and not solution.limited) or not legal(problem, solution):
            continue
        us = problem.time(solution)
        if us < min(found.us, best.us - margin) - _TINY:
            found = Found(solution, us)
    return _fewer_waits(problem, found) if found is not best else best


def _limited(problem: Problem, best: Found, solution: Solution, forced: bool) -> Found:
    found, us = limited(problem, solution, forced)
    return Found(found, us) if us < best.us - _TINY else best


def _better(problem: Problem, best: Found, solution: Solution) -> Found:
    solution = kept_apart(problem, solution)
    if not legal(problem, solution):
        return best
    return _chosen(problem, best, Found(solution, problem.time(solution)))


def _chosen(problem: Problem, best: Found, other: Found) -> Found:
    """``other`` if it is faster than ``best``; with more streams, by more than the threshold."""
    more = other.solution.stream_count > best.solution.stream_count > 1 and not math.isinf(best.us)
    margin = problem.options.threshold * best.us if more else 0.0
    return other if other.us < best.us - max(margin, _TINY) else best


def _fewer_waits(problem: Problem, found: Found) -> Found:
    """Without the waits that make nothing faster."""
    for wait in found.solution.waits:
        left = tuple(w for w in found.solution.waits if w != wait)
        tried = dataclasses.replace(found.solution, waits=left)
        us = problem.time(tried)
        if us <= found.us + _TINY and legal(problem, tried):
            found = Found(tried, us)
    return found


