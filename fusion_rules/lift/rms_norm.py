"""gamma · to_dtype(x · rsqrt(mean(x²) + eps))  →  cannopy::rms_norm(x, gamma, eps).

Models round before or after the product with gamma; the results differ by at most one unit in the last place.
gamma is one number per entry of the last dim, stored or computed (1 + w), or missing (all ones).
"""

from __future__ import annotations

from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, before_widening
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, where


def _float32(value: object) -> str | None:
    return None if isinstance(value, fx.Node) and dtype(value) == torch.float32 else describe(value)


WIDE = Any("wide", where=_float32, wants="float32 inside the norm")

MEAN = op(aten.mean.dim, op(aten.pow.Tensor_Scalar, Any("wide"), Number(equal=2)), Items((Number("dim"),)),
          Literal(True))
"""What makes a norm recognisable whose root or quotient is another one."""

FACTOR = op(aten.rsqrt.default, Alt((op(aten.add.Tensor, MEAN, Number("eps")), MEAN)))
"""1 / rms: what makes a norm recognisable where it is not used as one."""

NORMED = op(aten.mul.Tensor, WIDE, FACTOR, commutative=True, name="normed")

ROUNDED_FIRST = op(aten.mul.Tensor, Any("gamma"), Through(NORMED, over=CAST, name="rounded"), commutative=True)
"""The Llama family: the normalised value is rounded, then multiplied by gamma."""

GAMMA_FIRST = op(
    aten._to_copy.default,
    op(aten.mul.Tensor, Alt((op(aten._to_copy.default, Any("gamma"), dtype=Any()), Any("gamma"))), NORMED,
       commutative=True),
    dtype=Any("dtype"),
)
"""torch.nn.RMSNorm: multiplied by gamma in fp32, then rounded."""

ROUNDED = op(aten._to_copy.default, NORMED, dtype=Any("dtype"))
"""Without gamma."""


def _source(match: Match) -> fx.Node:
    return before_widening(match["wide"], dtype(match.anchor))


def check(match: Match, ctx: Context) -> Refusal | None:
    """The norm is over the last dim, gamma has one entry per element and all is rounded to the input's dtype."""
    x = _source(match)
    rank = len(shape(x))
    if match["dim"] not in (-1, rank - 1):
        return Refusal(f"the mean is over dim {match['dim']}, not over the last one", match.anchor, "constant",
                       f"dim -1 or {rank - 1}", f"dim {match['dim']}", "take the mean over the last dim: mean(-1)")
    rounded: fx.Node = match.get("rounded", match.anchor)
    if "gamma" in match.bound:
        refusal = _gamma_refusal(match, x, rounded)
        if refusal is not None:
            return refusal
    if {dtype(rounded), dtype(match.anchor)} != {dtype(x)}:
        return _mixed(match, f"normalised {dtype(rounded)}, result {dtype(match.anchor)}", x)
    return None


def _mixed(match: Match, others: str, x: fx.Node) -> Refusal:
    kind = describe(dtype(x))
    made = f" ({short(x.target)}, {where(x)})" if x.op == "call_function" else ""
    if is_call(x, aten._to_copy.default):
        above: Anything = x.args[0]
        made = f" (a cast of {describe(above)} at {where(above)})"
    found = f"input {dtype(x)}{made}, {others}"
    cure = f"cast the normalised value and gamma to {kind}, the dtype of the input"
    if dtype(match.anchor) != dtype(x) == torch.float32:  # all is float32 already, up to the result
        kind = describe(dtype(match.anchor))
        cure = f"give the norm its input in {kind}, the dtype of the result"
    return Refusal(f"the norm mixes dtypes: {found}", match.anchor, "dtype", f"{kind} throughout, float32 inside",
                   found, cure)


def _gamma_refusal(match: Match, x: fx.Node, rounded: fx.Node) -> Refusal | None:
    """gamma [D], or with dims of size 1 in front; of x's dtype, or fp32 where the product is rounded after it."""
    gamma = match["gamma"]
    if not isinstance(gamma, fx.Node):
        return Refusal(f"gamma is the number {gamma}, not one value for each of {shape(x)[-1]} entries", match.anchor,
                       "operand", f"a tensor [{shape(x)[-1]}]", f"the number {gamma}",
                       f"make gamma a parameter of {shape(x)[-1]} entries")
    if shape(gamma)[-1:] != shape(x)[-1:] or gamma.meta["val"].numel() != shape(x)[-1] or (
            len(shape(gamma)) > len(shape(x))):
        return Refusal(f"gamma has shape {shape(gamma)}, not [{shape(x)[-1]}]", match.anchor, "shape",
                       f"[{shape(x)[-1]}]", str(list(shape(gamma))),
                       f"give gamma one entry for each of the {shape(x)[-1]} of the last dim")
    wide = dtype(gamma) == torch.float32 and rounded is match.anchor
    if dtype(gamma) != dtype(x) and not wide:
        return _mixed(match, f"normalised {dtype(rounded)}, gamma {dtype(gamma)}, result {dtype(match.anchor)}", x)
    return None


def rewrite(match: Match, ctx: Context) -> None:
    """Replace the anchor by the dialect op."""
    x = _source(match)
    size = [shape(x)[-1]]
    if "gamma" in match.bound:
        gamma = ctx.editor.reshape(match["gamma"], size)
    else:
        device = x.meta["val"].device
        gamma = ctx.editor.call(aten.full.default, size, 1.0, dtype=dtype(x), device=device)
    node = ctx.editor.call(torch.ops.cannopy.rms_norm.default, x, gamma, float(match.get("eps", 0.0)))
    ctx.editor.replace(match.anchor, node)


RULES = tuple(
    Rule(
        name="lift_rms_norm",
        equation="gamma · (x · rsqrt(mean(x²) + eps)).to(x.dtype)  →  rms_norm(x, gamma, eps)",
        pattern=pattern,
        check=check,
        rewrite=rewrite,
        near=4,
        core=core,
    )
    for pattern, core in ((GAMMA_FIRST, NORMED), (ROUNDED_FIRST, NORMED), (ROUNDED, MEAN), (NORMED, FACTOR))
)
"""With gamma first: the forms without are part of them."""
