"""Decisions of distinct layers put together to a plan of the whole graph."""

from __future__ import annotations

from collections.abc import Sequence

from cannopy.stream_scheduler.plan import (
    Decision,
    Placement,
    PlannedPrefetch,
    SuperKernelRegion,
    Wait,
)
from cannopy.stream_scheduler.plan.keys import region_prefix
from cannopy.stream_scheduler.plan.segments import Segment
from cannopy.stream_scheduler.scheduler.gates import Verdict
from cannopy.stream_scheduler.scheduler.layer import Extras, Streams
from cannopy.stream_scheduler.scheduler.problem import Problem, stream_name
from cannopy.stream_scheduler.scheduler.windows import whole_order
from cannopy.stream_scheduler.simulator.schedule import MAIN


def placements(segment: Segment, problem: Problem, found: Streams, extra: Extras) -> list[Placement]:
    """The kernels of one layer in their order."""
    solution = found.solution
    placed = []
    for i in solution.order:
        region = extra.fused[i]
        placed.append(Placement(segment.tasks[i].name, stream_name(solution.streams[i]), solution.cores[i],
                                None if region is None else region_name(segment, region)))
    return placed


def region_name(segment: Segment, number: int) -> str:
    """Name of a SuperKernel region; unique in the graph."""
    return f"{region_prefix(segment)}sk{number}"


def regions(segment: Segment, extra: Extras, options: str) -> list[SuperKernelRegion]:
    """The SuperKernel regions of one layer."""
    numbers = sorted({region for region in extra.fused if region is not None})
    return [SuperKernelRegion(region_name(segment, number), options) for number in numbers]


def waits(segment: Segment, problem: Problem, found: Streams, previous: str | None) -> list[Wait]:
    """The waits of one layer. A side stream that nothing ties to this layer waits for ``previous``, the last kernel of
    the main stream before it, so that layers do not run into each other."""
    names = [task.name for task in segment.tasks]
    solution = found.solution
    result = [Wait(names[i], names[j]) for i, j in solution.waits]
    if previous is None:
        return result
    main = sum(1 << i for i in range(problem.size) if not solution.streams[i])
    above = whole_order(problem, solution)
    first = {solution.streams[i]: i for i in reversed(solution.order)}
    for stream, i in sorted(first.items()):
        if stream and not above[i] & main and previous not in segment.tasks[i].deps:
            result.append(Wait(names[i], previous))
    return result


def fetches(segments: Sequence[Segment], at: int, extra: Extras, streams: dict[str, str]) -> list[PlannedPrefetch]:
    """The prefetches that are issued in layer number ``at``; ``streams`` {kernel: its stream}."""
    here = segments[at]
    tasks = here.tasks + (segments[at + 1].tasks if at + 1 < len(segments) else ())
    found = []
    for fetch in extra.fetches:
        target, after = tasks[fetch.target], tasks[fetch.after].name
        found.append(PlannedPrefetch(target.weights[fetch.weight].name, fetch.bytes, after, target.name,
                                     streams.get(after, MAIN)))
    return found


def decision(feature: str, segments: Sequence[Segment], verdict: Verdict) -> Decision:
    """The decision on one feature for all ``segments``, which are of one kind; gains are those of all of them."""
    count = len(segments)
    return Decision(feature, where(segments), verdict.applied, verdict.reason, round(count * verdict.gain_us, 3),
                    round(count * verdict.worst_gain_us, 3))


def where(segments: Sequence[Segment]) -> str:
    """``layers 0-2, 5`` or the kernels of what belongs to no layer."""
    layers = sorted({s.layer for s in segments if s.layer is not None})
    parts = [f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"] if layers else []
    parts += [s.where for s in segments if s.layer is None]
    return ", ".join(parts)


def ranges(numbers: Sequence[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
