"""What the engine notes of rules with several variants, and operators named by text."""

from __future__ import annotations

import re

import pytest
import torch

from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.match import Match, Matcher
from cannopy.fusion_rules.engine.pattern import Any, op
from cannopy.fusion_rules.engine.rule import NEVER, Check, Context, Refusal, Rule
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


SCORES = op(aten.sigmoid.default, op(aten.mul.Tensor, op(aten.sin.default, op(aten.cos.default, Any("x"))),
                                     Any("weight"), commutative=True), name="scores")
NEAREST = {
    "one operation too many": (lambda x, w: (x.cos().sin().tanh() * w).sigmoid(), "aten.sin",
                               "aten.tanh float32[3, 4] in between"),
    "three too many": (lambda x, w: (x.cos().abs().neg().tanh().sin() * w).sigmoid(), "aten.cos",
                       "aten.tanh float32[3, 4], aten.neg float32[3, 4], aten.abs float32[3, 4] in between"),
    "one twice": (lambda x, w: (x.cos().sin().sin() * w).sigmoid(), "aten.cos", "aten.sin float32[3, 4] in between"),
    "one left out": (lambda x, w: (x.cos() * w).sigmoid(), "aten.sin", "aten.cos float32[3, 4]"),
    "another one": (lambda x, w: (x.cos().tan() * w).sigmoid(), "aten.sin", "aten.tan float32[3, 4]"),
}


@pytest.mark.parametrize("name", NEAREST)
def test_the_place_that_differs(name: str) -> None:
    body, expected, found = NEAREST[name]
    program, log = program_of(body, torch.zeros(3, 4), torch.zeros(4)), Log()
    apply([Rule("scores", "", SCORES, drop, near=2)], Context(program, Editor(program.gm)), log)
    (miss,) = log.misses
    assert (miss.expected, miss.found.partition(", read by ")[0]) == (expected, found)
    assert miss.matched >= 2 + (name != "another one")


def test_a_tensor_that_two_places_must_read() -> None:
    twice = op(aten.sub.Tensor, op(aten.cos.default, Any("x")), op(aten.sin.default, Any("x")))
    program, log = program_of(lambda x: x.abs().cos() - x.neg().sin(), torch.zeros(2)), Log()
    apply([Rule("a", "", twice, drop)], Context(program, Editor(program.gm)), log)
    (miss,) = log.misses
    assert miss.kind == "operand"
    assert miss.expected.startswith("the same x (aten.abs float32[2], ")
    assert ".py:" in miss.expected
    assert miss.found.startswith("aten.neg float32[2] as operand of aten.sin (")


def test_a_near_attempt_is_told_and_not_a_longer_far_one() -> None:
    far = Rule("a", "", op(aten.sin.default, op(aten.cos.default, op(aten.add.Tensor, Any(), Any())), Any()), drop,
               near=NEVER)
    near = Rule("a", "", op(aten.sin.default, op(aten.cos.default, op(aten.abs.default, Any()))), drop, near=2)
    assert [m.expected for m in log_of(far, near).misses] == ["aten.abs"]


def test_what_reads_the_value_is_told_where_it_is_another_line() -> None:
    program, log = program_of(lambda x: (x.cos() + 1.0).sin(), torch.zeros(3)), Log()
    for node in program.gm.graph.nodes:
        node.meta["source"] = "model.py:2" if node.target is aten.sin.default else "model.py:1"
    wanted = op(aten.sin.default, op(aten.add.Tensor, op(aten.tan.default, Any()), Any()))
    rules = [Rule("a", "", SIN_COS, drop, near=1), Rule("b", "", wanted, drop, near=1)]
    apply(rules, Context(program, Editor(program.gm)), log)
    assert [m.found for m in log.misses] == ["aten.add float32[3] in between, read by aten.sin (model.py:2)",
                                             "aten.cos float32[3]"]


def test_what_stands_where_a_rule_should_have_made_an_operation_is_written_out() -> None:
    normed = op(aten.sin.default, op("cannopy::rms_norm", Any("x"), rest=True))
    program, log = program_of(lambda x, w: ((x.cos() + 0.5) * w).sin(), torch.zeros(2), torch.zeros(2)), Log()
    apply([Rule("a", "", normed, drop, near=1)], Context(program, Editor(program.gm)), log)
    (miss,) = log.misses
    assert re.sub(r" at model.py:\d+", "", miss.found) == "aten.mul float32[2] = mul(add(cos(_), 0.5), _)"
    assert "model.py" in miss.found, "with the line of what another line computes"


def test_two_things_that_stop_a_form_and_the_form_inside_it_are_both_told() -> None:
    def refuses(what: str, name: str) -> Check:
        return lambda match, context: Refusal(what, match[name], "dtype", "a", "b")

    inner = op(aten.cos.default, Any("x"), name="inner")
    outer = op(aten.sin.default, inner, name="outer")

    def told(first: Check, second: Check) -> list[str]:
        program, log = program_of(lambda x: x.abs().cos().sin(), torch.zeros(3)), Log()
        rules = [Rule("a", "", outer, drop, first), Rule("a", "", inner, drop, second)]
        apply(rules, Context(program, Editor(program.gm)), log)
        return [m.reason for m in log.misses]

    assert told(refuses("added separately", "outer"), refuses("bool scales", "inner")) == ["added separately",
                                                                                           "bool scales"]
    assert told(refuses("mixed: a", "outer"), refuses("mixed: b", "inner")) == ["mixed: a"]


def test_what_a_view_arranges_is_told_with_its_line() -> None:
    program, log = program_of(lambda x: x.tanh().permute(1, 0).unsqueeze(0).sin(), torch.zeros(2, 3)), Log()
    apply([Rule("a", "", SIN_COS, drop, near=1)], Context(program, Editor(program.gm)), log)
    (miss,) = log.misses
    assert re.match(r"aten.unsqueeze float32\[1, 3, 2\] of aten.tanh float32\[2, 3\] at \S+\.py:\d+", miss.found)
