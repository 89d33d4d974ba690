"""A rule as a value, and why it may refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Op, Pattern
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import Editor, where
from cannopy.fx_passes.program import Program


@dataclass(frozen=True)
class Refusal:
    """Why a rule does not apply where its pattern matched.

    ``kind``: "condition" or, more precisely, "dtype", "shape", "constant", "reader" (an intermediate is read by
    others), "output" (an intermediate is returned), "weight" (a computed value where a parameter must be), "mask",
    "cache", "operation", "operand" or "contract". ``expected`` and ``found`` are values in words, ``remedy`` is what
    the user can do, ``clause`` a clause of a hardware contract as ``op.clause``.
    """

    reason: str
    node: fx.Node | None = None
    kind: str = "condition"
    expected: str = ""
    found: str = ""
    remedy: str = ""
    clause: str = ""


@dataclass
class Context:
    """What checks and rewrites may look at and change.

    ``target`` is the product whose contracts hold, ``block_size`` the rows per block of a paged cache (None: chosen),
    ``cann`` the CANN version that is lowered for (None: not known, limits of older versions hold).
    """

    program: Program
    editor: Editor
    target: str = "atlas-a3"
    block_size: int | None = None
    cann: str | None = None


Check = Callable[[Match, Context], Refusal | None]
Rewrite = Callable[[Match, Context], None]

NEVER = 1_000
"""As `Rule.near`: no failed match of the rule is worth a report, unless it has the operation of the core."""
SILENT = 10_000
"""As `Rule.near`: no failed match is worth a report at all; another rule of the same name tells what it lacks."""


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    ``equation`` says what becomes what; ``kernel`` names the device op (empty for a lift into the dialect).
    ``near`` is the number of matched operations from which a failed match is reported as a miss. ``core`` is the part
    of the pattern that makes the formula recognisable; where it matches outside of any match of the rule, what
    should follow it is missing, and that is a miss too. With `NEVER`, an attempt that has the core's operation is near.
    ``supersedes`` names rules whose failed attempts at a result no longer matter where this one makes that result.
    """

    name: str
    equation: str
    pattern: Pattern
    rewrite: Rewrite
    check: Check | None = None
    kernel: str = ""
    near: int = 3
    core: Op | None = None
    supersedes: tuple[str, ...] = ()

    @property
    def anchors(self) -> tuple[Any, ...]:
        """The operations at which the pattern can start."""
        pattern = self.pattern
        options = pattern.options if isinstance(pattern, Alt) else (pattern,)
        targets: list[Any] = []
        for option in options:
            if not isinstance(option, Op):
                raise TypeError(f"rule {self.name}: a pattern starts with an operation, not {option!r}")
            targets.extend(option.targets)
        return tuple(targets)


def other_reader(node: fx.Node, allowed: Collection[fx.Node], what: str) -> Refusal | None:
    """A refusal when ``node`` is read by more than ``allowed``: it names the reader and its line, or the output."""
    for user in node.users:
        if user in allowed:
            continue
        if user.op == "output":
            return Refusal(f"{what} is an output of the method, so it must be computed anyway", node, "output",
                           "no reader outside the formula", "the method returns it",
                           f"do not return {what}")
        return Refusal(f"{what} is also read by {describe(user)} at {where(user)}", node, "reader",
                       "no reader outside the formula", f"{user.name} ({where(user)})",
                       f"compute a copy for the other reader, or do without it: {where(user)}")
    return None
