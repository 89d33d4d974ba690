"""Runs of kernels that can be one SuperKernel, and what ends each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cannopy.stream_scheduler.scheduler import Cut, Runs
from cannopy.stream_scheduler.simulator import Task
from cannopy.superkernel.eligibility import TARGETS, why_not

LEAST = 2
"""A region of one kernel saves nothing."""


@dataclass(frozen=True)
class SuperKernels:
    """A `Fuser` for one target, ``family`` of products. SuperKernels exist for static graphs in torchair's mode
    max-autotune alone, which is what every graph is compiled to."""

    family: str

    @property
    def options(self) -> str:
        """A scope that cannot be fused is dropped with a warning rather than failing the build."""
        return "strict-scope-check=bypass"

    @property
    def refusal(self) -> str | None:
        """Why there can be no region at all."""
        if self.family not in TARGETS:
            return f"SuperKernels need one of {', '.join(sorted(TARGETS))}, the target is {self.family}"
        return None

    def runs(self, tasks: Sequence[Task], forbidden: frozenset[str] = frozenset()) -> Runs:
        """Maximal runs in one stream with one core limit; ``tasks`` in program order. A kernel that cannot be fused,
        or is ``forbidden``, ends the run of its stream."""
        open_: dict[str, list[int]] = {}
        runs: list[tuple[int, ...]] = []
        cuts: list[Cut] = []

        def close(stream: str) -> None:
            run = open_.pop(stream, [])
            if len(run) >= LEAST:
                runs.append(tuple(run))

        for i, task in enumerate(tasks):
            reason = "kept out of SuperKernels by the plan" if task.name in forbidden else why_not(task.load.kernel)
            if reason is not None:
                close(task.stream)
                cuts.append(Cut(task, reason))
                continue
            run = open_.setdefault(task.stream, [])
            if run and tasks[run[-1]].cores != task.cores:
                close(task.stream)
                cuts.append(Cut(task, f"the core limit changes from {_words(tasks[run[-1]])} to {_words(task)}"))
                run = open_.setdefault(task.stream, [])
            run.append(i)
        for stream in list(open_):
            close(stream)
        return Runs(tuple(sorted(runs)), tuple(cuts))


def _words(task: Task) -> str:
    return "the whole chip" if task.cores is None else f"{task.cores[0]} cube and {task.cores[1]} vector cores"
