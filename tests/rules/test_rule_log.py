"""What the engine notes of rules with several variants, and operators named by text."""

from __future__ import annotations

import torch

from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.match import Match, Matcher
from cannopy.fusion_rules.engine.pattern import Any, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fx_passes.graph import Editor, aten
from tests.passes.graphs import program_of

SIN_COS = op(aten.sin.default, op(aten.cos.default, Any("x")))


def refuse(match: Match, context: Context) -> Refusal:
    return Refusal("not today", match["x"])


def drop(match: Match, context: Context) -> None:
    context.editor.replace(match.anchor, match["x"])


def log_of(*rules: Rule) -> Log:
    """The log of ``rules`` on sin(cos(x + x))."""
    program = program_of(lambda x: (x + x).cos().sin(), torch.zeros(2))
    log = Log()
    apply(rules, Context(program, Editor(program.gm)), log)
    return log


def test_variants_give_one_reason_once() -> None:
    log = log_of(Rule("a", "", SIN_COS, drop, refuse), Rule("a", "", SIN_COS, drop, refuse))
    assert [m.reason for m in log.misses] == ["not today"]
    log = log_of(Rule("a", "", SIN_COS, drop, refuse), Rule("b", "", SIN_COS, drop, refuse))
    assert [m.rule for m in log.misses] == ["a", "b"]


def test_a_hit_settles_misses_of_its_rule_only() -> None:
    refused = [Rule(name, "", SIN_COS, drop, refuse) for name in ("a", "b")]
    log = log_of(*refused, Rule("a", "", SIN_COS, drop))
    assert log.counts() == {"a": 1}
    assert [m.rule for m in log.misses] == ["b"]


def test_operators_by_name() -> None:
    program = program_of(lambda x: x.cos().sin(), torch.zeros(2))
    sin = list(program.gm.graph.nodes)[2]
    assert Matcher(op("aten::sin", op("aten::cos", Any()))).match(sin) is not None
    assert Matcher(op("aten::sin", op("aten::sin", Any()))).match(sin) is None
    assert Matcher(op("aten.sin", Any())).match(sin) is None
