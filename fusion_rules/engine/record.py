"""What came of each rule at each place, as plain data: applied, nearly applied, tried."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from cannopy.fusion_rules.engine.stop import Stop, short
from cannopy.fx_passes.graph import where

if TYPE_CHECKING:
    from cannopy.fusion_rules.engine.rule import Rule


_NUMBERS = re.compile(r"(?<=[A-Za-z]_)\d+\b|@\d+|(?<=layers[.\[])\d+")
"""What tells corresponding nodes and modules of two layers apart."""


@dataclass(frozen=True)
class Hit:
    """A rule that was applied: where, and which source lines became one kernel.

    ``nodes`` are the nodes that it matched, ``made`` those that the rewrite added; both by name.
    """

    rule: str
    node: str
    layer: int | None
    module_path: str
    lines: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class Miss:
    """A rule that came near and did not apply.

    ``matched`` of ``total`` operations of its pattern were there. At ``node`` it wanted ``expected`` and there was
    ``found``; ``remedy`` is what would make it apply, in the user's terms. ``kind``: "operation", "constant",
    "operand", "value", "argument", "order" and "missing" come from the pattern (see `Stop`), the others from checks
    (see `Refusal`). ``clause`` names the clause of a hardware contract, ``op.clause``. ``near`` is False for
    an attempt that ends so early that it is worth telling only to who asks for it.
    """

    rule: str
    anchor: str
    reason: str
    node: str
    source: str
    layer: int | None = None
    module_path: str = ""
    matched: int = 0
    total: int = 0
    kind: str = "condition"
    expected: str = ""
    found: str = ""
    remedy: str = ""
    clause: str = ""
    source_text: str = ""
    near: bool = field(default=True, repr=False)
    nodes: tuple[str, ...] = field(default=(), repr=False)

    @staticmethod
    def stopped(rule: str, anchor: fx.Node, stop: Stop, near: bool) -> Miss:
        """A pattern that ended at ``stop``."""
        place = stop.node if stop.node is not None else anchor
        line = place if place.op == "call_function" or stop.user is None else stop.user
        return Miss(
            rule, anchor.name, stop.reason, place.name, where(line), anchor.meta.get("layer"),
            str(anchor.meta.get("module_path", "")), stop.matched, stop.total, stop.kind, stop.expected, stop.found,
            stop.remedy, "", source_text(line), near, tuple(n.name for n in stop.nodes),
        )

    @property
    def whole(self) -> bool:
        """Whether the whole pattern matched and a check refused."""
        return self.matched == self.total

    @property
    def rank(self) -> tuple[object, ...]:
        """Of two attempts at one place the lower one is told: near before far, then by matched operations."""
        return (not self.near, -self.matched, not self.whole)

    def kind_key(self) -> tuple[object, ...]:
        """The same for corresponding places of layers of one kind: rule, reason and line of the source."""
        return (self.rule, _NUMBERS.sub("#", self.reason), self.source, self.kind, self.near)


@dataclass
class Log:
    """What rules did: applied and nearly applied.

    Attempts of one rule that have an operation in common are one place; the furthest one stands for it, and none
    where the rule was applied. Of whole forms that a check refused for one thing the longest stands for those inside.
    """

    hits: list[Hit] = field(default_factory=list)
    attempts: list[Miss] = field(default_factory=list)
    seen: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def misses(self) -> list[Miss]:
        """The attempts that came near, one per place, in the order in which rules ran."""
        return [m for m in self.places() if m.near]

    def look(self, rule: Rule, operators: Iterable[Any]) -> None:
        """Note which operators the graph called when ``rule`` ran."""
        self.seen[rule.name] = frozenset(map(short, operators))

    def miss(self, miss: Miss) -> None:
        """Note an attempt."""
        self.attempts.append(miss)

    def hit(self, hit: Hit) -> None:
        """Note an application."""
        self.hits.append(hit)

    def settle(self, rules: Collection[str], anchor: str) -> None:
        """Forget the attempts of ``rules`` at ``anchor``: another rule has made that result."""
        self.attempts[:] = [m for m in self.attempts if m.anchor != anchor or m.rule not in rules]

    def counts(self) -> dict[str, int]:
        """Applications per rule."""
        found: dict[str, int] = {}
        for hit in self.hits:
            found[hit.rule] = found.get(hit.rule, 0) + 1
        return found

    def places(self) -> list[Miss]:
        """The furthest attempt of each rule at each place where it was not applied."""
        applied = {(h.rule, n) for h in self.hits for n in (*h.nodes, h.node)}
        taken: set[tuple[str, str]] = set()
        longer: set[tuple[str, str]] = set()
        refused: set[tuple[str, int | None, str, str]] = set()
        order = sorted(range(len(self.attempts)), key=lambda i: self.attempts[i].rank)
        kept: list[int] = []
        told: list[Miss] = []
        for i in order:
            miss = self.attempts[i]
            anchor, reason = (miss.rule, miss.anchor), (miss.rule, miss.layer, miss.node, miss.reason)
            mine = {anchor, *((miss.rule, name) for name in miss.nodes)}
            if miss.whole:
                inside = any(_stands_for(other, miss) for other in told)
                new = reason not in refused and anchor not in longer and not inside
            else:
                new = mine.isdisjoint(taken)
            if new and not _settled(miss, applied):
                kept.append(i)
                told += [miss] if miss.whole else []
                refused.add(reason)
                taken |= mine
                longer |= set() if miss.whole else mine
        return [self.attempts[i] for i in sorted(kept)]


def _stands_for(longer: Miss, miss: Miss) -> bool:
    """Whether both are whole forms, one inside the other, that were refused for the same thing, or the shorter one for
    an operand that only the longer one looks into."""
    inside = longer.rule == miss.rule and set(longer.nodes).issuperset(miss.nodes)
    what, other = (m.reason.partition(":")[0] for m in (longer, miss))
    told = longer.kind == miss.kind and (longer.node == miss.node or what == other)
    return inside and (told or (miss.node in longer.nodes and miss.node not in miss.nodes))


def _settled(miss: Miss, applied: Collection[tuple[str, str]]) -> bool:
    """Whether applications of its rule stand for an attempt.

    A whole form that a check refused is told of although a shorter form of the rule applied inside it; so is an attempt
    that lacks one operation only and gives another result: it reads into the place that was applied.
    """
    if (miss.rule, miss.anchor) in applied or (miss.rule, miss.node) in applied:
        return True
    return miss.matched + 1 < miss.total and any((miss.rule, name) in applied for name in miss.nodes)


def by_layer(misses: Iterable[Miss]) -> list[tuple[Miss, tuple[int, ...], int]]:
    """(first miss, layers, number of places) of each group of misses that differ in their layer only."""
    groups: dict[tuple[object, ...], list[Miss]] = {}
    for miss in misses:
        groups.setdefault(miss.kind_key(), []).append(miss)
    return [(members[0], _layers(members), len(members)) for members in groups.values()]


def kinds_of(hits: Iterable[Hit]) -> list[tuple[Hit, tuple[int, ...], int]]:
    """(first hit, layers, number of places) of each group of hits of one rule from the same lines of the source."""
    groups: dict[tuple[object, ...], list[Hit]] = {}
    for hit in hits:
        groups.setdefault((hit.rule, hit.lines, _NUMBERS.sub("#", hit.module_path)), []).append(hit)
    return [(members[0], _layers(members), len(members)) for members in groups.values()]


def _layers(members: Iterable[Hit | Miss]) -> tuple[int, ...]:
    return tuple(sorted({m.layer for m in members if m.layer is not None}))


def source_text(node: fx.Node) -> str:
    """The user's line of code that ``node`` comes from, empty when it is not known."""
    return str(node.meta.get("source_text") or "").strip()
