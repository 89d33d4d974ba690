"""gamma · to_dtype(x · rsqrt(mean(x²) + eps))  →  cannopy::rms_norm(x, gamma, eps).

Models round before or after the product with gamma; the results differ by at most one unit in the last place.
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, before_widening
from cannopy.fx_passes.graph import aten, dtype, shape


def _float32(value: object) -> str | None:
    return None if isinstance(value, fx.Node) and dtype(value) == torch.float32 else "a value that is not fp32"


WIDE = Any("wide", where=_float32)

NORMED = op(
    aten.mul.Tensor,
    WIDE,
    op(
        aten.rsqrt.default,
        op(
            aten.add.Tensor,
            op(aten.mean.dim, op(aten.pow.Tensor_Scalar, WIDE, Number(equal=2)), Items((Number("dim"),)),
               Literal(True)),
            Number("eps"),
        ),
    ),
    commutative=True,
    name="normed",
)

ROUNDED_FIRST = op(aten.mul.Tensor, Any("gamma"), Through(NORMED, over=CAST, name="rounded"), commutative=True)
"""The Llama family: the normalised value is rounded, then multiplied by gamma."""

GAMMA_FIRST = op(
    aten._to_copy.default,
    op(aten.mul.Tensor, Alt((op(aten._to_copy.default, Any("gamma"), dtype=Any()), Any("gamma"))), NORMED,
       commutative=True),
    dtype=Any("dtype"),
)
"""torch.nn.RMSNorm: multiplied by gamma in fp32, then rounded."""


def _source(match: Match) -> fx.Node:
    return before_widening(match["wide"], dtype(match.anchor))


def check(match: Match, ctx: Context) -> Refusal | None:
    """The norm is over the last dim, gamma has one entry per element and all is rounded to the input's dtype."""
    x, gamma = _source(match), match["gamma"]
    rank = len(shape(x))
    if match["dim"] not in (-1, rank - 1):
        return Refusal(f"the mean is over dim {match['dim']}, not over the last one", match.anchor)
    if not isinstance(gamma, fx.Node) or shape(gamma) != shape(x)[-1:]:
        return Refusal(f"gamma has shape {shape(gamma) if isinstance(gamma, fx.Node) else gamma}, "
                       f"not [{shape(x)[-1]}]", match.anchor)
    rounded: fx.Node = match.get("rounded", match.anchor)
    if {dtype(rounded), dtype(match.anchor), dtype(gamma)} != {dtype(x)}:
        return Refusal(f"the norm mixes dtypes: input {dtype(x)}, normalised {dtype(rounded)}, gamma {dtype(gamma)}, "
                       f"result {dtype(match.anchor)}", match.anchor)
    return None


def rewrite(match: Match, ctx: Context) -> None:
    """Replace the anchor by the dialect op."""
    node = ctx.editor.call(torch.ops.cannopy.rms_norm.default, _source(match), match["gamma"], float(match["eps"]))
    ctx.editor.replace(match.anchor, node)


RULES = tuple(
    Rule(
        name="lift_rms_norm",
        equation="gamma · (x · rsqrt(mean(x²) + eps)).to(x.dtype)  →  rms_norm(x, gamma, eps)",
        pattern=pattern,
        check=check,
        rewrite=rewrite,
        near=4,
        core=NORMED,
    )
    for pattern in (GAMMA_FIRST, ROUNDED_FIRST)
)
