"""Matching a pattern against a graph value, keeping the furthest point reached when it fails."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any as Anything

import torch
from torch import fx
from torch._ops import OpOverload

from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through
from cannopy.fusion_rules.engine.stop import Stop, describe, short, size_of, wording
from cannopy.fx_passes.graph import dtype, truncates, where

NUMBER_TOLERANCE = 1e-6


@dataclass(frozen=True)
class State:
    """Bindings and matched nodes along one branch of the search; ``crossed`` are the nodes looked through.

    ``hole`` is the one place that did not match, in a search that may pass over one (see `nearest`); ``gap`` tells that
    place again when the pattern comes to it a second time.
    """

    bound: Mapping[str, Anything] = field(default_factory=dict)
    nodes: tuple[fx.Node, ...] = ()
    crossed: tuple[fx.Node, ...] = ()
    hole: Stop | None = None
    gap: tuple[int, int] = (0, 0)

    def bind(self, name: str, value: Anything) -> State | None:
        """This state with ``name`` bound; None when it is bound to something else."""
        if not name:
            return self
        if name in self.bound:
            return self if _same(self.bound[name], value) else None
        return State({**self.bound, name: value}, self.nodes, self.crossed, self.hole, self.gap)

    def add(self, node: fx.Node) -> State:
        """This state with one more matched node."""
        if node in self.nodes:
            return self
        return State(self.bound, (*self.nodes, node), self.crossed, self.hole, self.gap)

    def cross(self, node: fx.Node) -> State:
        """This state with one more node looked through."""
        return State(self.bound, self.nodes, (*self.crossed, node), self.hole, self.gap)


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
            return Match(anchor, tuple(dict.fromkeys((*state.nodes, *state.crossed))), state.bound)
        return None

    def _fail(self, kind: str, p: Pattern, state: State, user: fx.Node | None, value: Anything, *,
              wanted: Pattern | str = "", text: str = "") -> None:
        best, count = self.stop, len(state.nodes)
        if best is not None and count < best.matched:
            return
        here = (wanted or p,)
        if best is not None and count == best.matched:
            if best.user is user and best.value is value and best.kind == kind:
                self.stop = replace(best, wanted=(*best.wanted, *here))
                return
            if count + len(state.crossed) <= best.reach:
                return
        self.stop = self._stop(kind, here, state, user, value, text)

    def _stop(self, kind: str, wanted: tuple[Pattern | str, ...], state: State, user: fx.Node | None, value: Anything,
              text: str) -> Stop:
        at = value if isinstance(value, fx.Node) else user
        count = len(state.nodes)
        return Stop(count, 0, kind, at, user, wanted, value, text, count + len(state.crossed), state.nodes)

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
                    self._fail("constant", p, state, user, value)
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
        if reason is not None:
            self._fail("value", p, state, user, value, text=reason)
        elif (bound := state.bind(p.name, value)) is not None:
            yield bound
        else:
            first = state.bound[p.name]
            line = f", {where(first)}" if isinstance(first, fx.Node) and first.op == "call_function" else ""
            self._fail("operand", p, state, user, value, wanted=f"the same {p.name} ({describe(first)}{line})",
                       text=f"{describe(value)} as operand of {short(user.target)} ({where(user)})" if user else "")

    def _number(self, p: Number, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (p.equal is not None and not math.isclose(value, p.equal, rel_tol=NUMBER_TOLERANCE)):
            self._fail("constant", p, state, user, value)
        elif (bound := state.bind(p.name, value)) is not None:
            yield bound
        else:
            self._fail("constant", p, state, user, value, wanted=f"{p.name} = {state.bound[p.name]:g}")

    def _items(self, p: Items, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        if not isinstance(value, list | tuple) or len(value) != len(p.items):
            self._fail("argument", p, state, user, value)
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
            if truncates(current) and not (p.truth and dtype(current) == torch.bool):
                return
            crossed, user, current = crossed.cross(current), current, current.args[0]

    def _op(self, p: Op, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        if not isinstance(value, fx.Node) or value.op != "call_function" or not is_one_of(value.target, p.targets):
            self._fail("operation", p, state, user, value)
            return
        if (len(value.args) > len(p.args) and not p.rest) or len(value.args) < len(p.args):
            self._fail("argument", p, state, user, value, wanted=f"{wording(p)} with {len(p.args)} arguments",
                       text=f"{len(value.args)} arguments")
            return
        extra = set(value.kwargs) - {k for k, _ in p.kwargs}
        if extra and not p.rest:
            self._fail("argument", p, state, user, value, wanted=f"{wording(p)} without {', '.join(sorted(extra))}")
            return
        here = state.add(value).bind(p.name, value)
        if here is None:
            self._fail("operand", p, state, user, value, wanted=f"the same {p.name}")
            return
        yield from self._arguments(p, value, here)

    def _arguments(self, p: Op, value: fx.Node, here: State) -> Iterator[State]:
        orders = [p.args]
        if p.commutative:
            orders.append((p.args[1], p.args[0], *p.args[2:]))
        keyword = [pattern for _, pattern in p.kwargs]
        given = [value.kwargs.get(k) for k, _ in p.kwargs]
        for args in orders:
            for found in self._all(args, value.args, here, value):
                yield from self._all(keyword, given, found, value)


class _Tolerant(Matcher):
    """A matcher that may pass over one place that differs; every result says which."""

    STEPS = 3_000
    BETWEEN = 3

    def __init__(self, pattern: Pattern) -> None:
        super().__init__(pattern)
        self.steps = 0
        self.failed: list[tuple[Pattern, Stop]] = []

    def best(self, anchor: fx.Node) -> Stop | None:
        """The hole of the result with most matched operations; alternatives at the same place are put together."""
        best: Stop | None = None
        for state in self._match(self.pattern, anchor, State(), None):
            if state.hole is None:
                return None
            count = len(state.nodes)
            stop = replace(state.hole, matched=count, reach=count + len(state.crossed), nodes=state.nodes)
            if best is None or (stop.matched, stop.reach) > (best.matched, best.reach):
                best = stop
            elif (stop.matched, stop.kind, stop.user, stop.value) == (best.matched, best.kind, best.user, best.value):
                best = replace(best, wanted=(*best.wanted, *stop.wanted))
        return best

    def _fail(self, kind: str, p: Pattern, state: State, user: fx.Node | None, value: Anything, *,
              wanted: Pattern | str = "", text: str = "") -> None:
        self.failed[:] = [(p, self._stop(kind, (wanted or p,), state, user, value, text))]

    def _match(self, p: Pattern, value: Anything, state: State, user: fx.Node | None) -> Iterator[State]:
        self.steps += 1
        if self.steps > self.STEPS:
            return
        some = False
        self.failed.clear()
        for found in super()._match(p, value, state, user):
            some = True
            yield found
        if some or user is None or not self.failed or self.failed[0][0] is not p:
            return
        gap, stop = (id(p), id(value)), self.failed[0][1]
        if state.hole is not None and state.gap != gap:
            return
        if isinstance(p, Op) and isinstance(value, fx.Node):
            yield from self._inserted(p, value, state, user)
            yield from self._left_out(p, value, state, user, stop)
        yield replace(state, hole=stop, gap=gap) if state.hole is None else state

    def _inserted(self, p: Op, value: fx.Node, state: State, user: fx.Node) -> Iterator[State]:
        """``p`` behind operations too many: one of any kind, then some of one operand."""
        gap, between, level = (id(p), id(value)), [value], [value]
        while level and len(between) <= self.BETWEEN:
            level = [operand for node in level if node.op == "call_function" for operand in node.all_input_nodes]
            text = f"{', '.join(map(describe, between))} in between"
            hole = state.hole or self._stop("operation", (p,), state, user, value, text)
            for operand in level:
                yield from super()._match(p, operand, replace(state, hole=hole, gap=gap), value)
            level = level if len(level) == 1 and not is_one_of(level[0].target, p.targets) else []
            between += level

    def _left_out(self, p: Op, value: fx.Node, state: State, user: fx.Node, stop: Stop) -> Iterator[State]:
        """What ``p`` reads, without ``p``; a sum or product without one of its operands is something else."""
        for operand in () if p.commutative else p.args:
            if size_of(operand):
                yield from super()._match(operand, value, replace(state, hole=state.hole or stop,
                                                                  gap=(id(p), id(value))), user)

    def _arguments(self, p: Op, value: fx.Node, here: State) -> Iterator[State]:
        yield from super()._arguments(p, value, here)
        if not p.commutative and here.hole is None and len(p.args) > 1 and isinstance(value.args[1], fx.Node):
            text = f"the operands of {short(value.target)} the other way round"
            wanted = f"{wording(p)} of {' and '.join(wording(a) for a in p.args[:2])}"
            hole = self._stop("order", (wanted,), here, value, value, text)
            swapped = (p.args[1], p.args[0], *p.args[2:])
            yield from self._all(swapped, value.args, replace(here, hole=hole), value)


def nearest(pattern: Pattern, anchor: fx.Node, stop: Stop) -> Stop:
    """``stop``, the furthest point of a failed match at ``anchor``, or the only place that differs if there is one.

    A search from the result stops at the first difference; when everything behind it matches as well, the place is
    certain and more of the pattern counts as matched.
    """
    found = _Tolerant(pattern).best(anchor)
    best = stop
    if found is not None and found.matched >= stop.matched:
        # Where the exact search got past the place in another way, it knows better what differs.
        passed = found.kind != "order" and found.value in stop.nodes
        best = replace(stop, matched=found.matched) if passed else found
    return replace(best, total=max(size_of(pattern), best.matched + 1))


def is_one_of(target: Anything, targets: Collection[Anything]) -> bool:
    """Whether an operator is among ``targets``, each an operator or an operator's full name."""
    return target in targets or (isinstance(target, OpOverload) and target.name() in targets)


def _same(a: Anything, b: Anything) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=NUMBER_TOLERANCE)
    return a is b
