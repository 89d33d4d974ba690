"""Matching a pattern against a graph value, keeping the furthest point reached when it fails."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any as Anything

from torch import Tensor, fx
from torch._ops import OpOverload

from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through
from cannopy.fx_passes.graph import where

NUMBER_TOLERANCE = 1e-6


@dataclass(frozen=True)
class State:
    """Bindings and matched nodes along one branch of the search."""

    bound: Mapping[str, Anything] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()

    def bind(self, name: str, value: Anything) -> State | None:
        """This state with ``name`` bound; None when it is bound to something else."""
        if not name:
            return self
        if name in self.bound:
            return self if _same(self.bound[name], value) else None
        return State({**self.bound, name: value}, self.nodes)

    def add(self, node: fx.Node) -> State:
        """This state with one more matched node."""
        return State(self.bound, (*self.nodes, node))


@dataclass(frozen=True)
class Stop:
    """Where a match came to an end: how many operations had matched, what was expected and what was there."""

    matched: int
    node: fx.Node | None
    expected: str
    found: str

    def __str__(self) -> str:
        place = f" at {self.node.name} ({where(self.node)})" if self.node is not None else ""
        return f"matched {self.matched} operations, then expected {self.expected}, found {self.found}{place}"


@dataclass(frozen=True)
class Match:
    """A whole match: the anchor, the nodes in it and the named values."""

    anchor: fx.Node
    nodes: tuple[fx.Node, ...]
    bound: Mapping[str, Anything]

    def __getitem__(self, name: str) -> Anything:
        return self.bound[name]

    def get(self, name: str, default: Anything = None) -> Anything:
        """The value bound to ``name`` or ``default``."""
        return self.bound.get(name, default)


class Matcher:
    """One attempt at one anchor."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.stop: Stop | None = None

    def match(self, anchor: fx.Node) -> Match | None:
        """The first match with ``anchor`` as result; on failure `stop` tells how far the best attempt came."""
        for state in self._match(self.pattern, anchor, State(), None):
            return Match(anchor, tuple(dict.fromkeys(state.nodes)), state.bound)
        return None

    def _fail(self, state: State, node: fx.Node | None, expected: str, found: str) -> None:
        count = len(dict.fromkeys(state.nodes))
        if self.stop is None or count > self.stop.matched:
            self.stop = Stop(count, node, expected, found)

    def _match(self, p: Pattern, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        match p:
            case Any():
                yield from self._any(p, value, state, user)
            case Number():
                yield from self._number(p, value, state, user)
            case Literal():
                if value == p.value and isinstance(value, bool) == isinstance(p.value, bool):
                    yield state
                else:
                    self._fail(state, user, repr(p.value), describe(value))
            case Items():
                yield from self._items(p, value, state, user)
            case Alt():
                for i, option in enumerate(p.options):
                    for found in self._match(option, value, state, user):
                        if (bound := found.bind(p.name, i)) is not None:
                            yield bound
            case Through():
                yield from self._through(p, value, state, user)
            case Op():
                yield from self._op(p, value, state, user)
            case _:
                raise TypeError(f"not a pattern: {p!r}")

    def _any(self, p: Any, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        reason = p.where(value) if p.where else None
        at = value if isinstance(value, fx.Node) else user
        if reason is not None:
            self._fail(state, at, p.name or "a value", reason)
        elif (bound := state.bind(p.name, value)) is not None:
            yield bound
        else:
            self._fail(state, at, f"the same {p.name} ({describe(state.bound[p.name])})", describe(value))

    def _number(self, p: Number, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(state, user, f"a number ({p.name or p.equal})", describe(value))
        elif p.equal is not None and not math.isclose(value, p.equal, rel_tol=NUMBER_TOLERANCE):
            self._fail(state, user, f"{p.name or 'the number'} = {p.equal:g}", f"{value:g}")
        elif (bound := state.bind(p.name, value)) is not None:
            yield bound
        else:
            self._fail(state, user, f"{p.name} = {state.bound[p.name]:g}", f"{value:g}")

    def _items(self, p: Items, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        if not isinstance(value, list | tuple) or len(value) != len(p.items):
            self._fail(state, user, f"a list of {len(p.items)}", describe(value))
            return
        yield from self._all(p.items, value, state, user)

    def _all(self, patterns: Sequence[Pattern], values: Sequence[Anything], state: State,
             user: fx.Node | None) -> Iterator[State]:
        if not patterns:
            yield state
            return
        for found in self._match(patterns[0], values[0], state, user):
            yield from self._all(patterns[1:], values[1:], found, user)

    def _through(self, p: Through, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        current, crossed = value, state
        while True:
            for found in self._match(p.inner, current, crossed, user):
                if (bound := found.bind(p.name, value)) is not None:
                    yield bound
            if not (isinstance(current, fx.Node) and current.op == "call_function" and current.target in p.over):
                return
            crossed, user, current = crossed.add(current), current, current.args[0]

    def _op(self, p: Op, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        if not isinstance(value, fx.Node) or value.op != "call_function" or not is_one_of(value.target, p.targets):
            self._fail(state, value if isinstance(value, fx.Node) else user, _names(p), describe(value))
            return
        if (len(value.args) > len(p.args) and not p.rest) or len(value.args) < len(p.args):
            self._fail(state, value, f"{_names(p)} with {len(p.args)} arguments", f"{len(value.args)} arguments")
            return
        extra = set(value.kwargs) - {k for k, _ in p.kwargs}
        if extra and not p.rest:
            self._fail(state, value, f"{_names(p)} without {', '.join(sorted(extra))}", describe(value))
            return
        here = state.add(value).bind(p.name, value)
        if here is None:
            self._fail(state, value, f"the same {p.name}", describe(value))
            return
        orders = [p.args]
        if p.commutative:
            orders.append((p.args[1], p.args[0], *p.args[2:]))
        keyword = [pattern for _, pattern in p.kwargs]
        given = [value.kwargs.get(k) for k, _ in p.kwargs]
        for args in orders:
            for found in self._all(args, value.args, here, value):
                yield from self._all(keyword, given, found, value)


def is_one_of(target: Anything, targets: Collection[Anything]) -> bool:
    """Whether an operator is among ``targets``, each an operator or an operator's full name."""
    return target in targets or (isinstance(target, OpOverload) and target.name() in targets)


def _same(a: Anything, b: Anything) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=NUMBER_TOLERANCE)
    return a is b


def _names(p: Op) -> str:
    return " or ".join(str(t).replace(".default", "") for t in p.targets)


def describe(value: Anything) -> str:
    """A short description of a graph value for messages."""
    if isinstance(value, fx.Node):
        fake = value.meta.get("val")
        kind = f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}" if isinstance(fake, Tensor) else ""
        what = str(value.target).replace(".default", "") if value.op == "call_function" else value.op
        return f"{what} {kind}".strip()
    return repr(value)
