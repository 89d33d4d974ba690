"""One spelling for what models write in many ways. Each module holds one step, and ``run(program)`` to run it alone."""

from __future__ import annotations

from typing import Any

from cannopy.fx_passes.normalise import (
    arithmetic,
    casts,
    complexes,
    constants,
    cse,
    indices,
    kept,
    linears,
    noops,
    slices,
    stacks,
    views,
    writes,
)
from cannopy.fx_passes.normalise.worklist import Known, Step, Worklist
from cannopy.fx_passes.program import Program

PIPELINE: tuple[Step, ...] = (
    complexes.STEP,
    arithmetic.STEP,
    noops.STEP,
    casts.STEP,
    constants.STEP,
    views.STEP,
    slices.STEP,
    indices.STEP,
    writes.STEP,
    linears.STEP,
    noops.STEP,
    views.STEP,
    stacks.STEP,
)
"""The rewrites of one round, in order; equal calls are merged behind them."""

MAX_ROUNDS = 16


class NoFixedPointError(RuntimeError):
    """The rewrites undo each other; the message names those that still changed something."""


class NormalForm:
    """What is known of a program that was normalised, so that the next time only what changed is looked at."""

    def __init__(self, program: Program, calls: cse.Calls) -> None:
        self.known = Known(program.gm.graph)
        self.calls = calls
        self.facts = _facts(program)

    def __deepcopy__(self, memo: object) -> None:
        return None


def run(program: Program, max_rounds: int = MAX_ROUNDS) -> int:
    """Apply `PIPELINE` until nothing changes; the number of changes. Raises `NoFixedPointError`."""
    before = program.normal_form
    if not isinstance(before, NormalForm) or before.known.graph is not program.gm.graph:
        before = None
    changed = before.known.changed() if before is not None else []
    if before is not None and changed is None and before.facts == _facts(program):
        return 0
    calls = before.calls if before is not None else cse.Calls()
    worklist = Worklist(program, (*PIPELINE, calls.step))
    if before is None:
        worklist.add_all()
    else:
        worklist.add(changed or ())
    program.normal_form = None
    total = _rounds(worklist, max_rounds) + kept.run(program)
    program.normal_form = NormalForm(program, calls)
    return total


def _rounds(worklist: Worklist, most: int) -> int:
    total = 0
    changed: dict[str, int] = {}
    for _ in range(most):
        changed = worklist.round()
        if not changed:
            return total
        total += sum(changed.values())
    still = ", ".join(f"{name} ({count})" for name, count in changed.items())
    raise NoFixedPointError(f"the graph still changes after {most} rounds of normalisation: {still}")


def forget(program: Program) -> None:
    """Look at every node the next time that ``program`` is normalised."""
    program.normal_form = None


def _facts(program: Program) -> Any:
    return frozenset(program.facts.get(writes.NONNEGATIVE, ()))
