"""silu(x Wgᵀ) · (x Wuᵀ)  →  npu_swiglu(x cat(Wg, Wu)ᵀ);   silu(first half of a) · second half of a  →  npu_swiglu(a).

npu_swiglu computes in fp32 and rounds once to the dtype of its input. Models that multiply in bf16 round twice, models
that cast both halves to fp32 first round once: both become the op, without their casts.
"""

from __future__ import annotations

from typing import Any as Anything
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Number, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.rewrite.trial import Call, refused
from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

MERGED = "torch.cat((w[0], w[1]))"
CASTS = (aten._to_copy.default,)


def _product(gate: Pattern, up: Pattern) -> Pattern:
    silu = op(aten.silu.default, Through(gate, over=CASTS, name="gate"), name="silu")
    return op(aten.mul.Tensor, Through(silu, over=CASTS, name="activated"), Through(up, over=CASTS, name="up"),
              commutative=True, name="product")


def _half(name: str) -> Pattern:
    source = Through(Any("whole"), over=(), name=f"{name}_source")
    return op(aten.slice.Tensor, source, *(Number(f"{name}_{k}") for k in ("dim", "start", "end", "step")))


LINEARS = _product(
    op(aten.linear.default, Any("x"), Any("gate_weight"), name="gate_linear"),
    op(aten.linear.default, Any("x"), Any("up_weight"), name="up_linear"),
)
HALVES = _product(_half("gate"), _half("up"))


def _precision_refusal(match: Match, narrow: torch.dtype) -> Refusal | None:
    """Result and inputs have the same dtype; in between there may be only that dtype and fp32."""
    if dtype(match.anchor) != narrow:
        return Refusal(f"the product stays {dtype(match.anchor)}, npu_swiglu gives the {narrow} of its input",
                       match.anchor)
    for name in ("gate", "silu", "activated", "up", "product"):
        node: fx.Node = match[name]
        if dtype(node) not in (narrow, torch.float32):
            return Refusal(f"{node.name} is rounded to {dtype(node)} inside the product", node)
    product: fx.Node = match["product"]
    if product is not match.anchor and len(product.users) != 1:
        return Refusal("the product has other readers before it is cast", product)
    return None


def _source(match: Match) -> fx.Node:
    """The tensor that was cut in halves, before it was widened to fp32."""
    whole: fx.Node = match["whole"]
    if is_call(whole, *CASTS) and dtype(whole) == torch.float32:
        narrow = cast(fx.Node, whole.args[0])
        if dtype(narrow) == dtype(match.anchor):
            return narrow
    return whole


def _halves_refusal(match: Match) -> Refusal | None:
    whole: fx.Node = match["whole"]
    gate = tuple(match[f"gate_{k}"] for k in ("dim", "start", "end", "step"))
    up = tuple(match[f"up_{k}"] for k in ("dim", "start", "end", "step"))
    dim = gate[0]
    size = shape(whole)[dim]
    first, second = (dim, 0, size // 2, 1), (dim, size // 2, size, 1)
    if size % 2 or (gate, up) != (first, second):
        swapped = (gate, up) == (second, first)
        found = "the second half" if swapped else f"[start, end, step] {list(gate[1:])} with {list(up[1:])}"
        return Refusal(f"SiLU must be on the first half of dim {dim} and multiply the second, found {found}",
                       match["silu"])
    return None


def _emit_halves(match: Match, call: Call) -> Anything:
    return call(torch.ops.npu.npu_swiglu.default, _source(match), match["gate_dim"])


def _check_halves(match: Match, context: Context) -> Refusal | None:
    return (
        _halves_refusal(match)
        or _precision_refusal(match, dtype(_source(match)))
        or refused(context, lambda call: _emit_halves(match, call), match.anchor)
    )


def _rewrite_halves(match: Match, context: Context) -> None:
    context.editor.replace(match.anchor, _emit_halves(match, context.editor.call))


def _emit_linears(match: Match, call: Call, weight: Anything) -> Anything:
    return call(torch.ops.npu.npu_swiglu.default, call(aten.linear.default, match["x"], weight))


def _check_linears(match: Match, context: Context) -> Refusal | None:
    weights = [match["gate_weight"], match["up_weight"]]
    for weight in weights:
        reason = why_not_weight(context.program, weight)
        if reason is not None:
            return Refusal(f"gate and up weights must be parameters to be merged at load time: {reason}", weight)
    if shape(weights[0]) != shape(weights[1]) or dtype(weights[0]) != dtype(weights[1]):
        return Refusal(f"gate weight {dtype(weights[0])}{list(shape(weights[0]))} and up weight "
                       f"{dtype(weights[1])}{list(shape(weights[1]))} do not merge", match["up_linear"])
    for name in ("gate_linear", "up_linear"):
        if len(match[name].users) != 1:
            return Refusal(f"{match[name].name} has other readers, merging would compute it twice", match[name])
    merged = preview(context.editor, weights, MERGED)
    return _precision_refusal(match, dtype(match["gate_linear"])) or refused(
        context, lambda call: _emit_linears(match, call, merged), match.anchor
    )


def _rewrite_linears(match: Match, context: Context) -> None:
    weights = [match["gate_weight"], match["up_weight"]]
    merged = derived(context.program, context.editor, f"{weights[0].name}_up", weights, MERGED)
    context.editor.replace(match.anchor, _emit_linears(match, context.editor.call, merged))


def _cast(product: Pattern) -> Pattern:
    return op(aten._to_copy.default, product, dtype=Any())


_TWO = "silu(x Wgᵀ) · (x Wuᵀ)  →  npu_swiglu(x cat(Wg, Wu)ᵀ)"
_ONE = "silu(a[first half]) · a[second half]  →  npu_swiglu(a)"
RULES = (
    Rule("swiglu", _TWO, _cast(LINEARS), _rewrite_linears, _check_linears, "npu_swiglu"),
    Rule("swiglu", _TWO, LINEARS, _rewrite_linears, _check_linears, "npu_swiglu"),
    Rule("swiglu", _ONE, _cast(HALVES), _rewrite_halves, _check_halves, "npu_swiglu"),
    Rule("swiglu", _ONE, HALVES, _rewrite_halves, _check_halves, "npu_swiglu"),
)
"""The forms with a last cast (fp32 inside) first: the shorter forms are part of them."""
