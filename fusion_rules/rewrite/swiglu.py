"""silu(x Wgᵀ) · (x Wuᵀ)  →  npu_swiglu(x cat(Wg, Wu)ᵀ);   silu(first half of a) · second half of a  →  npu_swiglu(a).

npu_swiglu computes in fp32 and rounds once to the dtype of its input. Models that multiply in bf16 round twice, models
that cast both halves to fp32 first round once: both become the op, without their casts.
"""

from __future__ import annotations

from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import Call, refused
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Number, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule, other_reader
from cannopy.fusion_rules.engine.spellings import CAST, arguments, before_widening, gated_halves_refusal, half
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

MERGED = "torch.cat((w[0], w[1]))"
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor)
ACTIVATIONS = (aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
               aten.hardswish.default, aten.mish.default)


def _product(gate: Pattern, up: Pattern) -> Pattern:
    over = CAST + CLAMPS
    gated = Through(gate, over=over, name="gate")
    silu = op(ACTIVATIONS, gated, rest=True, name="silu")
    steeper = op(aten.sigmoid.default, op(aten.mul.Tensor, gated, Number("slope"), commutative=True, name="sloped"))
    quick = op(aten.mul.Tensor, gated, steeper, commutative=True, name="silu")
    return op(aten.mul.Tensor, Through(Alt((silu, quick)), over=over, name="activated"),
              Through(up, over=over, name="up"), commutative=True, name="product")


SILU = op(aten.silu.default, Any("gate"))
LINEARS = _product(
    op(aten.linear.default, Any("x"), Any("gate_weight"), rest=True, name="gate_linear"),
    op(aten.linear.default, Any("x"), Any("up_weight"), rest=True, name="up_linear"),
)
HALVES = _product(half(Any("whole"), "gate"), half(Any("whole"), "up"))


def _look_alike(match: Match) -> Refusal | None:
    """Other activations and clamped values."""
    if "slope" in match.bound:
        found = f"x * sigmoid({match['slope']:g} * x)"
        return Refusal(f"the activation is {found}, npu_swiglu has SiLU, x * sigmoid(x)", match["sloped"], "constant",
                       "x * sigmoid(x)", found, "use SiLU (hidden_act=silu)")
    if not is_call(match["silu"], aten.silu.default):
        return Refusal(f"the activation is {match['silu'].target}, npu_swiglu has SiLU", match["silu"], "operation",
                       "aten.silu", short(match["silu"].target), "use SiLU (hidden_act=silu)")
    for node in match.nodes:
        if is_call(node, *CLAMPS):
            return Refusal("values are clamped inside the product, npu_swiglu does not clamp", node, "operation",
                           "no clamp between the projections and the product", describe(node),
                           "drop the clamp; with it the formula is another one, and runs as captured")
    return None


def _precision_refusal(match: Match, narrow: torch.dtype) -> Refusal | None:
    """Result and inputs have the same dtype; in between there may be only that dtype and fp32."""
    if dtype(match.anchor) != narrow:
        return Refusal(f"the product stays {dtype(match.anchor)}, npu_swiglu gives the {narrow} of its input",
                       match.anchor, "dtype", str(narrow), str(dtype(match.anchor)),
                       f"cast the product to {narrow}")
    for node in match.nodes:
        if dtype(node) not in (narrow, torch.float32):
            return Refusal(f"a value is rounded to {dtype(node)} inside the product", node, "dtype",
                           f"{narrow} or torch.float32", str(dtype(node)), f"keep {narrow} or float32 in between")
    product: fx.Node = match["product"]
    if product is match.anchor:
        return None
    return other_reader(product, match.nodes, "the product, before it is cast,")


def _source(match: Match) -> fx.Node:
    """The tensor that was cut in halves, before it was widened to fp32."""
    return before_widening(match["whole"], dtype(match.anchor))


def _halves_refusal(match: Match) -> Refusal | None:
    return gated_halves_refusal(match, match["gate_dim"], shape(match["whole"])[match["gate_dim"]])


def _emit_halves(match: Match, call: Call) -> Anything:
    source = _source(match)
    dim = (match["gate_dim"],) if match["gate_dim"] != len(shape(source)) - 1 else ()
    return call(torch.ops.npu.npu_swiglu.default, source, *dim)


def _check_halves(match: Match, context: Context) -> Refusal | None:
    return (
        _look_alike(match)
        or _halves_refusal(match)
        or _precision_refusal(match, dtype(_source(match)))
        or refused(context, lambda call: _emit_halves(match, call), match.anchor)
    )


def _rewrite_halves(match: Match, context: Context) -> None:
    context.editor.replace(match.anchor, _emit_halves(match, context.editor.call))


def _biases(match: Match) -> list[fx.Node]:
    """The biases of the linears that have one."""
    found = (arguments(match[name])["bias"] for name in ("gate_linear", "up_linear"))
    return [bias for bias in found if bias is not None]


def _emit_linears(match: Match, call: Call, weight: Anything, bias: Anything) -> Anything:
    extra = () if bias is None else (bias,)
    return call(torch.ops.npu.npu_swiglu.default, call(aten.linear.default, match["x"], weight, *extra))


def _weights_refusal(match: Match, context: Context) -> Refusal | None:
    """Both linears have constant weights of one shape and dtype, and both or none a bias."""
    gate, up = match["gate_weight"], match["up_weight"]
    biases = _biases(match)
    for weight in (gate, up, *biases):
        reason = why_not_weight(context.program, weight)
        if reason is not None:
            return Refusal(f"gate and up weights must be parameters to be merged at load time: {reason}", weight,
                           "weight", "a parameter or buffer", reason, "keep the weight in the module as a parameter")
    if len(biases) == 1:
        return Refusal("only one of the gate and up projections has a bias", biases[0], "operand",
                       "a bias on both projections or on none", "one bias", "give the other projection a zero bias")
    if shape(gate) != shape(up) or dtype(gate) != dtype(up):
        return Refusal(f"gate weight {dtype(gate)}{list(shape(gate))} and up weight {dtype(up)}{list(shape(up))} do "
                       "not merge", match["up_linear"], "shape", f"{describe(dtype(gate))}{list(shape(gate))} for both",
                       f"{describe(dtype(up))}{list(shape(up))} for up", "give gate and up one size and dtype")
    return None


def _check_linears(match: Match, context: Context) -> Refusal | None:
    refusal = _look_alike(match) or _weights_refusal(match, context)
    if refusal is not None:
        return refusal
    for name, what in (("gate_linear", "the gate projection"), ("up_linear", "the up projection")):
        refusal = other_reader(match[name], match.nodes, what)
        if refusal is not None:
            return refusal
    weight = preview(context.editor, [match["gate_weight"], match["up_weight"]], MERGED)
    bias = preview(context.editor, _biases(match), MERGED) if _biases(match) else None
    return _precision_refusal(match, dtype(match["gate_linear"])) or refused(
        context, lambda call: _emit_linears(match, call, weight, bias), match.anchor
    )


def _rewrite_linears(match: Match, context: Context) -> None:
    def merged(sources: list[fx.Node]) -> fx.Node:
        return derived(context.program, context.editor, f"{sources[0].name}_up", sources, MERGED)

    weight = merged([match["gate_weight"], match["up_weight"]])
    bias = merged(_biases(match)) if _biases(match) else None
    context.editor.replace(match.anchor, _emit_linears(match, context.editor.call, weight, bias))


def _cast(product: Pattern) -> Pattern:
    return op(aten._to_copy.default, product, dtype=Any())


_TWO = "silu(x Wgᵀ) · (x Wuᵀ)  →  npu_swiglu(x cat(Wg, Wu)ᵀ)"
_ONE = "silu(a[first half]) · a[second half]  →  npu_swiglu(a)"
RULES = (
    Rule("swiglu", _TWO, _cast(LINEARS), _rewrite_linears, _check_linears, "npu_swiglu", NEVER, SILU),
    Rule("swiglu", _TWO, LINEARS, _rewrite_linears, _check_linears, "npu_swiglu", NEVER, SILU),
    Rule("swiglu", _ONE, _cast(HALVES), _rewrite_halves, _check_halves, "npu_swiglu", NEVER, SILU),
    Rule("swiglu", _ONE, HALVES, _rewrite_halves, _check_halves, "npu_swiglu", NEVER, SILU),
)
"""The forms with a last cast (fp32 inside) first: the shorter forms are part of them. Only attempts with a SiLU are
near misses, every product of two values would be one otherwise; look-alikes match and `_look_alike` refuses them."""
