"""A rule as a value, and what came of it at each place in a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Op, Pattern
from cannopy.fx_passes.graph import Editor, where
from cannopy.fx_passes.program import Program


@dataclass(frozen=True)
class Refusal:
    """Why a rule does not apply where its pattern matched."""

    reason: str
    node: fx.Node | None = None


@dataclass
class Context:
    """What checks and rewrites may look at and change.

    ``target`` is the product whose contracts hold, ``block_size`` the rows per block of a paged cache (None: chosen).
    """

    program: Program
    editor: Editor
    target: str = "atlas-a3"
    block_size: int | None = None


Check = Callable[[Match, Context], Refusal | None]
Rewrite = Callable[[Match, Context], None]

NEVER = 1_000
"""As `Rule.near`: no failed match of the rule is worth a report."""


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    ``equation`` says what becomes what; ``kernel`` names the device op (empty for a lift into the dialect).
    ``near`` is the number of matched operations from which a failed match is reported as a miss.
    """

    name: str
    equation: str
    pattern: Pattern
    rewrite: Rewrite
    check: Check | None = None
    kernel: str = ""
    near: int = 3

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


@dataclass(frozen=True)
class Hit:
    """A rule that was applied: where, and which source lines became one kernel."""

    rule: str
    node: str
    layer: int | None
    module_path: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Miss:
    """A rule that came near and did not apply."""

    rule: str
    anchor: str
    reason: str
    node: str
    source: str
    layer: int | None = None
    module_path: str = ""
    matched: int = 0

    @staticmethod
    def at(rule: str, anchor: fx.Node, reason: str, node: fx.Node | None, matched: int) -> Miss:
        """A miss of ``rule`` at ``anchor`` that stopped at ``node``."""
        place = node if node is not None else anchor
        return Miss(
            rule, anchor.name, reason, place.name, where(place), anchor.meta.get("layer"),
            str(anchor.meta.get("module_path", "")), matched,
        )
