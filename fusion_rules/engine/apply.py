"""Run rules over a program: every anchor in graph order, each rule in its turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from cannopy.fusion_rules.engine.match import Match, Matcher, is_one_of
from cannopy.fusion_rules.engine.rule import Context, Hit, Miss, Rule


@dataclass
class Log:
    """What rules did: applied and nearly applied."""

    hits: list[Hit] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)

    def miss(self, miss: Miss) -> None:
        """Note a miss; variants of one rule give one reason at one node once."""
        if all((m.rule, m.node, m.reason) != (miss.rule, miss.node, miss.reason) for m in self.misses):
            self.misses.append(miss)

    def hit(self, hit: Hit, nodes: Iterable[fx.Node]) -> None:
        """Note an application to ``nodes``; misses of the rule's other variants there are settled by it."""
        names = {node.name for node in nodes}
        self.misses = [m for m in self.misses if m.rule != hit.rule or not names & {m.node, m.anchor}]
        self.hits.append(hit)

    def counts(self) -> dict[str, int]:
        """Applications per rule."""
        found: dict[str, int] = {}
        for hit in self.hits:
            found[hit.rule] = found.get(hit.rule, 0) + 1
        return found


def apply(rules: Iterable[Rule], context: Context, log: Log) -> int:
    """Apply each rule at each anchor once; the number of applications.

    Rules run in the given order, a whole graph at a time, so that a later rule sees what an earlier one made.
    """
    total = 0
    for rule in rules:
        anchors = set(rule.anchors)
        for node in list(context.editor.graph.nodes):
            if node.op == "call_function" and is_one_of(node.target, anchors) and (node.users or node.is_impure()):
                total += _at(rule, node, context, log)
        context.editor.sweep()
    return total


def _at(rule: Rule, node: fx.Node, context: Context, log: Log) -> int:
    matcher = Matcher(rule.pattern)
    match = matcher.match(node)
    if match is None:
        stop = matcher.stop
        if stop is not None and stop.matched >= rule.near:
            log.miss(Miss.at(rule.name, node, str(stop), stop.node, stop.matched))
        return 0
    refusal = rule.check(match, context) if rule.check else None
    if refusal is not None:
        log.miss(Miss.at(rule.name, node, refusal.reason, refusal.node, len(match.nodes)))
        return 0
    hit = _hit(rule, match)
    with context.editor.before(node, rule=rule.name if rule.kernel else None):
        rule.rewrite(match, context)
    log.hit(hit, match.nodes)
    return 1


def _hit(rule: Rule, match: Match) -> Hit:
    lines = tuple(dict.fromkeys(str(n.meta["source"]) for n in match.nodes if n.meta.get("source")))
    anchor = match.anchor
    return Hit(rule.name, anchor.name, anchor.meta.get("layer"), str(anchor.meta.get("module_path", "")), lines)
