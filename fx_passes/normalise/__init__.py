"""One spelling for what models write in many ways. Each module holds one pass: ``run(program) -> int`` changes."""

from __future__ import annotations

from collections.abc import Callable

from cannopy.fx_passes.normalise import (
    arithmetic,
    casts,
    constants,
    cse,
    indices,
    linears,
    noops,
    slices,
    views,
    writes,
)
from cannopy.fx_passes.program import Program

PIPELINE: tuple[tuple[str, Callable[[Program], int]], ...] = (
    ("arithmetic", arithmetic.run),
    ("noops", noops.run),
    ("casts", casts.run),
    ("constants", constants.run),
    ("views", views.run),
    ("slices", slices.run),
    ("indices", indices.run),
    ("writes", writes.run),
    ("linears", linears.run),
    ("noops", noops.run),
    ("views", views.run),
    ("cse", cse.run),
)
"""The rewrites of one round, in order."""

MAX_ROUNDS = 16


class NoFixedPointError(RuntimeError):
    """The rewrites undo each other; the message names those that still changed something."""


def run(program: Program, max_rounds: int = MAX_ROUNDS) -> int:
    """Apply `PIPELINE` until nothing changes; the number of changes. Raises `NoFixedPointError`."""
    total = 0
    for _ in range(max_rounds):
        changed: dict[str, int] = {}
        for name, step in PIPELINE:
            count = step(program)
            if count:
                changed[name] = changed.get(name, 0) + count
        if not changed:
            return total
        total += sum(changed.values())
    still = ", ".join(f"{name} ({count})" for name, count in changed.items())
    raise NoFixedPointError(f"the graph still changes after {max_rounds} rounds of normalisation: {still}")
