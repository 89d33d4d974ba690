"""gamma · to_dtype(x · rsqrt(mean(x²) + eps))  →  cannopy::rms_norm(x, gamma, eps)."""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Items, Literal, Number, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, before_widening
from cannopy.fx_passes.graph import aten, dtype, shape


def _float32(value: object) -> str | None:
    return None if isinstance(value, fx.Node) and dtype(value) == torch.float32 else "a value that is not fp32"


WIDE = Any("wide", where=_float32)

PATTERN = op(
    aten.mul.Tensor,
    Any("gamma"),
    Through(
        op(
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
        ),
        over=CAST,
        name="rounded",
    ),
    commutative=True,
)


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
    rounded: fx.Node = match["rounded"]
    if dtype(rounded) != dtype(x) or dtype(match.anchor) != dtype(x) or dtype(gamma) != dtype(x):
        return Refusal(f"the norm mixes dtypes: input {dtype(x)}, normalised {dtype(rounded)}, gamma {dtype(gamma)}, "
                       f"result {dtype(match.anchor)}", match.anchor)
    return None


def rewrite(match: Match, ctx: Context) -> None:
    """Replace the anchor by the dialect op."""
    node = ctx.editor.call(torch.ops.cannopy.rms_norm.default, _source(match), match["gamma"], float(match["eps"]))
    ctx.editor.replace(match.anchor, node)


RULE = Rule(
    name="lift_rms_norm",
    equation="gamma · (x · rsqrt(mean(x²) + eps)).to(x.dtype)  →  rms_norm(x, gamma, eps)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    near=4,
)
