"""The stream of each group of collectives, one for the whole graph.

What layers want is not always the same: a group that the largest kind of layer has on a side stream may stand between
collectives of other groups in another kind, which then wait for each other. So the kinds are solved twice where one of
them had to follow another: with the streams that the largest kinds want, and with those groups on main.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from cannopy.stream_scheduler.plan import PlanError
from cannopy.stream_scheduler.scheduler.layer import Streams
from cannopy.stream_scheduler.scheduler.problem import Problem, stream_name

Solver = Callable[[Hashable, Mapping[str, int]], tuple[Problem, Streams]]
"""Solves the kind of layers with this key, its groups at these homes."""


@dataclass(frozen=True)
class Solved:
    """All kinds; ``us`` of all layers, each by itself. ``followed``: groups on a side stream that a kind has because
    another one wanted it."""

    problems: Mapping[Hashable, Problem]
    streams: Mapping[Hashable, Streams]
    us: float
    followed: frozenset[str]


def fixed(problems: Sequence[Problem]) -> dict[str, int]:
    """Homes that are given: where a user has pinned a kernel of the group; main, where one of its kernels ends a layer
    or cannot wait. `PlanError` where that is not one stream."""
    homes: dict[str, int] = {}
    because: dict[str, str] = {}
    for problem in problems:
        for i, group in enumerate(problem.groups):
            pin = problem.pins[i]
            pinned = pin is not None and pin.stream is not None
            if group is None or not problem.alone(i):
                continue
            (stream,) = problem.streams_of(i, 1, False)
            name = problem.tasks[i].name
            why = f"{name} is pinned to {stream_name(stream)}" if pinned else f"{name} can only be on main"
            if homes.setdefault(group, stream) != stream:
                raise PlanError(f"the collectives of the group {group} have to be in one stream: {because[group]}, and "
                                f"{why}; pin all of them to one stream")
            because.setdefault(group, why)
    return homes


def solve(kinds: Sequence[tuple[Hashable, int]], given: Mapping[str, int], solver: Solver, threshold: float) -> Solved:
    """Every kind of ``kinds`` (key, number of layers) in turn, with ``given`` homes. A group stays on the stream that
    it was given first, or is on main, unless following costs less than main by more than ``threshold``, a share."""
    free = _in_turn(kinds, given, solver)
    if not free.followed:
        return free
    on_main = _in_turn(kinds, {**given, **dict.fromkeys(free.followed, 0)}, solver)
    return free if free.us < (1 - threshold) * on_main.us else on_main


def _in_turn(kinds: Sequence[tuple[Hashable, int]], given: Mapping[str, int], solver: Solver) -> Solved:
    homes = dict(given)
    problems: dict[Hashable, Problem] = {}
    streams: dict[Hashable, Streams] = {}
    followed: set[str] = set()
    us = 0.0
    for kind, count in kinds:
        problem, found = solver(kind, homes)
        problems[kind], streams[kind] = problem, found
        us += count * problem.time(found.solution)
        here = problem.found_homes(found.solution)
        followed |= {group for group, stream in here.items() if stream and group in homes and group not in given}
        homes = {**here, **homes}
    return Solved(problems, streams, us, frozenset(followed))
