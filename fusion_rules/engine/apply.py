"""Run rules over a program: every anchor in graph order, each rule in its turn."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator

from torch import fx
from torch._ops import OpOverload

from cannopy.fusion_rules.engine.match import Match, Matcher, is_one_of, nearest
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Op, Pattern, Through
from cannopy.fusion_rules.engine.record import Hit, Log, Miss, source_text
from cannopy.fusion_rules.engine.rule import NEVER, SILENT, Context, Refusal, Rule
from cannopy.fusion_rules.engine.stop import Stop, describe, short, size_of
from cannopy.fx_passes import order
from cannopy.fx_passes.graph import aten, is_call, where

__all__ = ["Log", "apply"]

THOROUGH = 2
"""Matched operations from which a failed attempt is searched for the only place that differs."""
SURE = 3
"""Matched operations from which an attempt that lacks one place only is near, whatever `Rule.near` says."""
LEVELS = 8
"""Operations that read one another, above the core of a formula, among which the formula may end."""
LOOK_THROUGH = (aten._to_copy.default, aten.reshape.default, aten.expand.default, operator.getitem)
RECOGNISED = ("cannopy", "npu")
"""Namespaces of operations that only a rule makes: where a long formula ends in one, a search is always worth it."""


def apply(rules: Iterable[Rule], context: Context, log: Log) -> int:
    """Apply each rule at each anchor once; the number of applications.

    Rules run in the given order, a whole graph at a time, so that a later rule sees what an earlier one made.
    """
    total = 0
    rules = tuple(rules)
    last = {rule.name: i for i, rule in enumerate(rules)}
    for i, rule in enumerate(rules):
        log.look(rule, context.editor.operators())
        for node in context.editor.calls(rule.anchors):
            if (node.users or context.editor.is_impure(node)) and _same_output(rule.pattern, node):
                total += _at(rule, node, context, log)
        context.editor.sweep()
        if last[rule.name] == i:
            _incomplete([r for r in rules if r.name == rule.name], context, log)
    return total


def _same_output(pattern: Pattern, node: fx.Node) -> bool:
    """Whether ``node`` is the output of an operation with several that ``pattern`` starts from; True for others."""
    if node.target is not operator.getitem or not isinstance(pattern, Op):
        return True
    return not isinstance(pattern.args[1], Literal) or pattern.args[1].value == node.args[1]


def _at(rule: Rule, node: fx.Node, context: Context, log: Log) -> int:
    matcher = Matcher(rule.pattern)
    match = matcher.match(node)
    if match is None:
        if matcher.stop is not None:
            _stopped(rule, node, matcher.stop, log)
        return 0
    refusal = rule.check(match, context) if rule.check else None
    if refusal is not None:
        if not isinstance(refusal, Refusal):  # a user's check is not type-checked
            raise TypeError(f"the check of rule {rule.name} returned {refusal!r}; it returns a Refusal or None")
        log.miss(_refused(rule, match, refusal))
        return 0
    made, touched = context.editor.made, context.editor.touched
    start, first = len(made), len(touched)
    with context.editor.before(node, rule=rule.name if rule.kernel else None):
        rule.rewrite(match, context)
    order.settle([*made[start:], *touched[first:]])
    log.hit(_hit(rule, match, [n.name for n in made[start:]]))
    log.settle(rule.supersedes, node.name)
    return 1


def _stopped(rule: Rule, node: fx.Node, stop: Stop, log: Log) -> None:
    recognised = isinstance(node.target, OpOverload) and node.target.namespace in RECOGNISED
    if stop.matched < min(rule.near, THOROUGH) and not (recognised and rule.near > THOROUGH):
        return
    stop = nearest(rule.pattern, node, stop)
    log.miss(Miss.stopped(rule.name, node, stop, _near(rule, node, stop)))


def _near(rule: Rule, node: fx.Node, stop: Stop) -> bool:
    """Whether an attempt is worth a report to who did not ask."""
    if rule.near != NEVER:
        return stop.reach >= rule.near
    known = rule.core is not None and any(is_one_of(n.target, rule.core.targets) for n in stop.nodes if n is not node)
    return known or (stop.matched >= SURE and stop.matched >= size_of(rule.pattern))


def _refused(rule: Rule, match: Match, refusal: Refusal) -> Miss:
    anchor, place = match.anchor, refusal.node if refusal.node is not None else match.anchor
    readers = (n for n in match.nodes if place in n.all_input_nodes)
    line = place if place.op == "call_function" else next(readers, anchor)
    return Miss(
        rule.name, anchor.name, refusal.reason, place.name, where(line), anchor.meta.get("layer"),
        str(anchor.meta.get("module_path", "")), len(match.nodes), len(match.nodes), refusal.kind, refusal.expected,
        refusal.found, refusal.remedy, refusal.clause, source_text(line), True, tuple(n.name for n in match.nodes),
    )


def _hit(rule: Rule, match: Match, made: Iterable[str]) -> Hit:
    lines = tuple(dict.fromkeys(str(n.meta["source"]) for n in match.nodes if n.meta.get("source")))
    anchor = match.anchor
    return Hit(rule.name, anchor.name, anchor.meta.get("layer"), str(anchor.meta.get("module_path", "")), lines,
               tuple(n.name for n in match.nodes), tuple(made))


def _incomplete(variants: list[Rule], context: Context, log: Log) -> None:
    """Note where the core of a rule is, without what makes it the whole formula."""
    cores = {id(r.core): r for r in variants if r.core is not None}
    for rule in cores.values():
        assert rule.core is not None
        for node in context.editor.calls(rule.core.targets):
            if node.users:
                match = Matcher(rule.core).match(node)
                if match is not None:
                    log.miss(_missing(rule, variants, match))
                    _around(variants, match, log)


def _around(variants: list[Rule], core: Match, log: Log) -> None:
    """Note the attempts at the readers of a core that have all but one place, which `apply` gave up too early."""
    level, seen = [core.anchor], {core.anchor}
    for _ in range(LEVELS):
        level = [u for n in level for u in n.users if u.op == "call_function" and u not in seen]
        seen.update(level)
        for node, rule in ((n, r) for n in level for r in variants
                           if r.near != SILENT and is_one_of(n.target, r.anchors)):
            matcher = Matcher(rule.pattern)
            if matcher.match(node) is None and matcher.stop is not None:
                stop = nearest(rule.pattern, node, matcher.stop)
                if core.anchor in stop.nodes and stop.matched > len(core.nodes):
                    log.miss(Miss.stopped(rule.name, node, stop, True))


def _missing(rule: Rule, variants: list[Rule], match: Match) -> Miss:
    assert rule.core is not None
    core, match = _climbed(variants, rule.core, match)
    above = [p for v in variants for p in _above(v.pattern, core)]
    last, found = _followed(match.anchor, {p.split(" with ")[0] for p in above})
    total = max(len(match.nodes) + 1, min(size_of(v.pattern) for v in variants))
    count = len(match.nodes)
    wanted = tuple(above) or (min((v.pattern for v in variants), key=size_of),)
    stop = Stop(count, total, "missing", last, last, wanted, None, found, count, match.nodes)
    return Miss.stopped(rule.name, match.anchor, stop, True)


def _climbed(variants: list[Rule], core: Op, match: Match) -> tuple[Op, Match]:
    """The largest part of a pattern around ``core`` that matches, where each step has one reader only."""
    if len(match.anchor.users) == 1:
        reader = next(iter(match.anchor.users))
        for part in (p for v in variants for p in _parts(v.pattern) if is_one_of(reader.target, p.targets)):
            operands = (*part.args, *(v for _, v in part.kwargs))
            found = Matcher(part).match(reader) if any(_reaches(o, core) for o in operands) else None
            if found is not None:
                return _climbed(variants, part, found)
    return core, match


def _parts(pattern: Pattern) -> Iterator[Op]:
    """The operations of a pattern below its result."""
    match pattern:
        case Op():
            inner: tuple[Pattern, ...] = (*pattern.args, *(v for _, v in pattern.kwargs))
        case Items():
            inner = pattern.items
        case Alt():
            inner = pattern.options
        case Through():
            inner = (pattern.inner,)
        case _:
            inner = ()
    for p in inner:
        yield from (p,) if isinstance(p, Op) else ()
        yield from _parts(p)


def _followed(last: fx.Node, wanted: Collection[str]) -> tuple[fx.Node, str]:
    """What reads ``last``, behind operations that change no value or dtype only: (what they give, the readers)."""
    casts = []
    while len(last.users) == 1:
        reader = next(iter(last.users))
        if reader.target not in LOOK_THROUGH or short(reader.target) in wanted:
            break
        casts += [reader] if is_call(reader, aten._to_copy.default) else []
        last = reader
    readers = [u for u in last.users if u.op != "output"]
    told = "; ".join(f"{describe(u)} ({where(u)})" for u in readers[:3]) or "the result is an output of the method"
    return last, ", then ".join([*(f"{describe(c)} ({where(c)})" for c in casts), told])


def _above(pattern: Pattern, core: Op) -> Iterator[str]:
    """The operations of ``pattern`` that read ``core``."""
    match pattern:
        case Op():
            operands = (*pattern.args, *(v for _, v in pattern.kwargs))
            for operand in operands:
                if _reaches(operand, core):
                    others = [name for a in operands if a is not operand and (name := _name(a))]
                    yield f"{' or '.join(dict.fromkeys(map(short, pattern.targets)))}" + (
                        f" with {' and '.join(others)}" if others else "")
                else:
                    yield from _above(operand, core)
        case Items():
            for item in pattern.items:
                yield from _above(item, core)
        case Through():
            yield from _above(pattern.inner, core)
        case Alt():
            for option in pattern.options:
                yield from _above(option, core)


def _name(p: Pattern) -> str:
    """The name of the value that ``p`` binds, possibly behind a cast."""
    match p:
        case Any():
            return p.name
        case Alt():
            return next((name for o in p.options if (name := _name(o))), "")
        case Through():
            return _name(p.inner)
    return ""


def _reaches(pattern: Pattern, core: Op) -> bool:
    """Whether ``pattern`` is ``core``, possibly looked through or as one alternative."""
    match pattern:
        case Through():
            return _reaches(pattern.inner, core)
        case Alt():
            return any(_reaches(o, core) for o in pattern.options)
    return pattern is core
