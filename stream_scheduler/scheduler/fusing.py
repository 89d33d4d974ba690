"""Which runs of kernels of a solved layer become SuperKernels.

What may be fused is not known here: a `Fuser` (package `superkernel`) cuts a layer into runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cannopy.stream_scheduler.scheduler.stretch import Fetch, Stretch
from cannopy.stream_scheduler.scheduler.windows import beside
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
    crowded = beside(problem, solution)
    fused: list[int | None] = [None] * stretch.size
    us = stretch.time(fetches)
    for run in sorted(runs, key=lambda run: (-len(run), run)):
        for choice in ((run,), _parts(run, crowded)):
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


def _numbered(stretch: Stretch, fused: Sequence[int | None]) -> tuple[int | None, ...]:
    """Regions numbered in program order."""
    numbers: dict[int, int] = {}
    for i in stretch.first[1].order:
        if (region := fused[i]) is not None:
            numbers.setdefault(region, len(numbers))
    return tuple(None if region is None else numbers[region] for region in fused)
