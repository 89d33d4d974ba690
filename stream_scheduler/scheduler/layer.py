"""What is decided for one distinct layer: streams and limits by itself, prefetches and regions with the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cannopy.stream_scheduler.plan import PlanError, Switch
from cannopy.stream_scheduler.scheduler import search
from cannopy.stream_scheduler.scheduler.fusing import Cut, Fuser, fuse
from cannopy.stream_scheduler.scheduler.gates import Verdict, judge
from cannopy.stream_scheduler.scheduler.prefetch import prefetches
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution
from cannopy.stream_scheduler.scheduler.search import Found
from cannopy.stream_scheduler.scheduler.stretch import Fetch, Stretch
from cannopy.stream_scheduler.scheduler.windows import legal, serial

FORBIDDEN = Verdict(False, 0.0, 0.0, "forbidden")


@dataclass(frozen=True)
class Streams:
    """Streams and limits of a layer, with the verdict on each."""

    solution: Solution
    streams: Verdict
    limits: Verdict


@dataclass(frozen=True)
class Extras:
    """Prefetches and SuperKernel regions of a layer, with the verdict on each."""

    fetches: tuple[Fetch, ...]
    fused: tuple[int | None, ...]
    prefetch: Verdict
    super_kernel: Verdict
    cuts: tuple[Cut, ...] = ()


def streams(problem: Problem) -> Streams:
    """Decide streams, then core limits on top of what was decided."""
    options = problem.options
    plain = serial(problem)
    if not legal(problem, plain):
        raise PlanError(f"the pins of {problem.tasks[0].name} and the kernels behind it put kernels that need all "
                        "their cores at once into two streams, and no wait can be put on one of them; pin core limits "
                        "that fit the chip, or one stream")
    current = Found(plain, problem.time(plain))
    switch = options.pins.switch("streams")
    if switch == "forbid" or options.streams == 1:
        reason = "forbidden" if switch == "forbid" else "one stream allowed"
        return Streams(plain, Verdict(False, 0.0, 0.0, reason), Verdict(False, 0.0, 0.0, "one stream"))
    if not problem.has_branches:
        nothing = Verdict(False, 0.0, 0.0, "no two kernels are independent of each other")
        return Streams(plain, nothing, nothing)
    free = search.unlimited(problem, options.streams)
    first = _judged(problem, current, free, switch, "no order of the kernels on more streams is faster")
    current = free if first.applied else current
    limits = options.pins.switch("core_limits")
    if limits == "forbid":
        return Streams(current.solution, first, FORBIDDEN)
    best = search.with_limits(problem, options.streams, free, forced=limits == "force")
    second = _judged(problem, current, best, limits, "no split of the cores is faster")
    if second.applied and not first.applied and best.solution.stream_count > 1:
        first = Verdict(True, second.gain_us, second.worst_gain_us, "with core limits: " + second.reason)
    return Streams(best.solution if second.applied else current.solution, first, second)


def _judged(problem: Problem, before: Found, after: Found, switch: Switch, nothing: str) -> Verdict:
    if after.solution == before.solution:
        return Verdict(False, 0.0, 0.0, f"no gain: {nothing}")
    least = _least(problem, serial(problem))
    return judge(lambda cost: problem.time(before.solution, cost), lambda cost: problem.time(after.solution, cost),
                 least, switch)


def extras(stretch: Stretch, fuser: Fuser | None, why_not: str) -> Extras:
    """Decide prefetches, then SuperKernel regions on top of them."""
    problem = stretch.first[0]
    fetches, verdict = _prefetch(stretch)
    plain: tuple[int | None, ...] = (None,) * stretch.size
    switch = problem.options.pins.switch("super_kernel")
    if switch == "forbid" or fuser is None or fuser.refusal is not None:
        reason = "forbidden" if switch == "forbid" else why_not
        return Extras(fetches, plain, verdict, Verdict(False, 0.0, 0.0, reason))
    fused, cuts = _fused(stretch, fetches, fuser, switch)
    if not any(region is not None for region in fused):
        nothing = Verdict(False, 0.0, 0.0, "no gain: no run of kernels is faster as a SuperKernel")
        return Extras(fetches, plain, verdict, nothing, cuts)
    second = judge(lambda cost: stretch.time(fetches, plain, cost), lambda cost: stretch.time(fetches, fused, cost),
                   _least(*stretch.first), switch)
    if not second.applied:
        pinned = {fused[i] for i in _kept(problem)}
        fused = tuple(region if region in pinned else None for region in fused)
    return Extras(fetches, fused, verdict, second, cuts)


def _prefetch(stretch: Stretch) -> tuple[tuple[Fetch, ...], Verdict]:
    problem = stretch.first[0]
    switch = problem.options.pins.switch("prefetch")
    if switch == "forbid":
        return (), FORBIDDEN
    pins = _pins(stretch)
    forbidden = frozenset(i for i, pin in enumerate(pins) if pin is False)
    wanted = frozenset(i for i, pin in enumerate(pins) if pin is True or (switch == "force" and pin is None))
    found = tuple(prefetches(stretch, forbidden, wanted))
    if not found:
        return (), Verdict(False, 0.0, 0.0, "no gain: no weight would arrive in time beside what else reads HBM")
    verdict = judge(lambda cost: stretch.time((), (), cost), lambda cost: stretch.time(found, (), cost),
                    _least(*stretch.first), switch)
    if verdict.applied:
        return found, verdict
    return tuple(f for f in found if f.target in wanted), verdict


def _least(problem: Problem, solution: Solution) -> float:
    """What a feature has to win in a layer, in microseconds."""
    return max(problem.options.threshold * problem.time(solution), problem.options.least_us)


def _pins(stretch: Stretch) -> list[bool | None]:
    """What a user said about prefetching the weights of each task of the stretch."""
    problems = [stretch.first[0], *([stretch.then[0]] if stretch.then is not None else [])]
    return [None if pin is None else pin.prefetch for problem in problems for pin in problem.pins]


def _fused(stretch: Stretch, fetches: Sequence[Fetch], fuser: Fuser, switch: Switch
           ) -> tuple[tuple[int | None, ...], tuple[Cut, ...]]:
    problem, solution = stretch.first
    order = solution.order
    out = frozenset(t.name for t, pin in zip(problem.tasks, problem.pins, strict=True)
                    if pin is not None and pin.super_kernel is False)
    runs = fuser.runs([stretch.tasks[i] for i in order], out)
    places = [tuple(order[n] for n in run) for run in runs.runs]
    kept = range(stretch.size) if switch == "force" else _kept(problem)
    return fuse(stretch, fetches, places, frozenset(kept)), runs.cuts


def _kept(problem: Problem) -> list[int]:
    """Tasks that a user wants in a SuperKernel."""
    return [i for i, pin in enumerate(problem.pins) if pin is not None and pin.super_kernel]
