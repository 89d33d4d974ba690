"""Which runs of kernels of a solved layer become SuperKernels.

What may be fused is not known here: a `Fuser` (package `superkernel`) cuts a layer into runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cannopy.stream_scheduler.scheduler.stretch import Fetch, Stretch
from cannopy.stream_scheduler.scheduler.windows import beside, whole_order
from cannopy.stream_scheduler.simulator import Task

_TINY = 1e-6


@dataclass(frozen=True)
class Cut:
    """Kernel ``task`` that ends a run, and why."""

    task: Task
    reason: str


@dataclass(frozen=True)
class Runs:
    """Places of tasks that may be fused, run by run, and what stands between them."""

    runs: tuple[tuple[int, ...], ...]
    cuts: tuple[Cut, ...]


class Fuser(Protocol):
    """Knows what a SuperKernel can hold."""

    @property
    def options(self) -> str:
        """Options of a region as torchair takes them."""

    @property
    def refusal(self) -> str | None:
        """Why no region is possible at all; None where they are."""

    def runs(self, tasks: Sequence[Task], forbidden: frozenset[str]) -> Runs:
        """Cut ``tasks``, in program order with streams and limits, into maximal runs without the ``forbidden``."""


def fuse(stretch: Stretch, fetches: Sequence[Fetch], runs: Sequence[tuple[int, ...]], kept: frozenset[int]
         ) -> tuple[int | None, ...]:
    """Region numbers of the first layer's tasks. A run that makes the layer slower, because it holds cores that another
    stream wants, is tried without the kernels that run beside others. Runs with a task of ``kept`` are fused wherever
    that can run."""
    problem, solution = stretch.first
    crowded, above = beside(problem, solution), whole_order(problem, solution)
    fused: list[int | None] = [None] * stretch.size
    us = stretch.time(fetches)
    for run in sorted(runs, key=lambda run: (-len(run), run)):
        for choice in (_ready(stretch, run, crowded, above),
                       tuple(p for part in _parts(run, crowded) for p in _ready(stretch, part, crowded, above))):
            tried = list(fused)
            for part in choice:
                number = 1 + max((n for n in tried if n is not None), default=-1)
                for i in part:
                    tried[i] = number
            time = stretch.time(fetches, tried)
            wanted = any(i in kept for part in choice for i in part)
            if time < us - _TINY or (wanted and time < math.inf):
                fused, us = tried, time
                break
    return _numbered(stretch, fused)


def _parts(run: tuple[int, ...], crowded: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Runs of two or more without the kernels that run beside others."""
    parts: list[list[int]] = [[]]
    for i in run:
        if crowded[i]:
            parts.append([])
        else:
            parts[-1].append(i)
    return tuple(tuple(part) for part in parts if len(part) > 1)


def _ready(stretch: Stretch, run: tuple[int, ...], crowded: Sequence[int], above: Sequence[int]
           ) -> tuple[tuple[int, ...], ...]:
    """``run``, cut before each kernel that waits for one of another stream that the first one need not wait for: it
    could find no cores beside the region, whatever the times. Not cut where the region and the largest kernels of each
    stream that can be beside it fit the chip together."""
    problem, solution = stretch.first
    place = {i: n for n, i in enumerate(solution.order)}
    own = sum(1 << i for i in range(problem.size) if solution.streams[i] == solution.streams[run[0]])
    parts: list[list[int]] = [[]]
    early = others = 0
    for i in sorted(run, key=place.__getitem__):
        if parts[-1] and above[i] & ~early & ~own:
            parts.append([])
        early = early if parts[-1] else above[i]
        parts[-1].append(i)
        others |= (crowded[i] | above[i]) & ~own
    others &= ~above[min(run, key=place.__getitem__)]
    most: dict[int, tuple[int, int]] = {}
    for j in (*run, *(j for j in range(problem.size) if others >> j & 1)):
        stream, used = solution.streams[j], problem.used(j, solution.cores[j])
        old = most.get(stream, (0, 0))
        most[stream] = max(old[0], used[0]), max(old[1], used[1])
    chip = problem.machine.cube_cores, problem.machine.vector_cores
    if all(sum(used[k] for used in most.values()) <= chip[k] for k in (0, 1)):
        return (run,)
    return tuple(tuple(part) for part in parts if len(part) > 1)


def _numbered(stretch: Stretch, fused: Sequence[int | None]) -> tuple[int | None, ...]:
    """Regions numbered in program order."""
    numbers: dict[int, int] = {}
    for i in stretch.first[1].order:
        if (region := fused[i]) is not None:
            numbers.setdefault(region, len(numbers))
    return tuple(None if region is None else numbers[region] for region in fused)
