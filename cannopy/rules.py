"""Everything that a file with rules of your own needs: patterns, what a rule is given, how it refuses.

    import cannopy
    from cannopy.rules import Any, aten, op

    @cannopy.rule(
        equation="x · σ(x)  →  silu(x)",
        pattern=op(aten.mul.Tensor, Any("x"), op(aten.sigmoid.default, Any("x")), commutative=True),
        before="swiglu",
    )
    def silu(match, context):
        context.editor.replace(match.anchor, context.editor.call(aten.silu.default, match["x"]))

``cannopy run MODEL --rules my_rules.py`` or ``Options(rules=("my_rules.py",))`` takes the file; a distribution offers
its rules as an entry point of the group ``cannopy.rules``. docs/add-a-fusion.md is the guide, `cannopy.testing` has a
check for the numbers. A pattern is read from the result towards the inputs, on a normalised ATen graph; after
``lift`` some of it is dialect ops (``cannopy::rms_norm``, ``cannopy::rotary``, ``cannopy::attention``).
"""

from __future__ import annotations

from cannopy.fusion_rules.engine.legal import illegal, refused
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule, other_reader
from cannopy.fusion_rules.extension import RuleCodeError, RuleFileError, UserRule, rule
from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.weight_plan import derived, why_not_weight

__all__ = [
    "Alt",
    "Any",
    "Context",
    "Editor",
    "Items",
    "Literal",
    "Match",
    "Number",
    "Op",
    "Pattern",
    "Refusal",
    "Rule",
    "RuleCodeError",
    "RuleFileError",
    "Through",
    "UserRule",
    "aten",
    "derived",
    "dtype",
    "illegal",
    "is_call",
    "op",
    "other_reader",
    "refused",
    "rule",
    "shape",
    "why_not_weight",
]
