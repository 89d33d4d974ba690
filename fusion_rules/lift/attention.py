"""softmax(q · kᵀ · scale + mask) · v, written out  →  cannopy::attention(q, k, v, mask, scale).

Models round the scores and the weights to their dtype in between; the op keeps them in fp32.
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Literal, Number, Through, op
from cannopy.fusion_rules.engine.rule import SILENT, Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import aten, dtype, shape

_products = op(aten.matmul.default, Any("q"), op(aten.permute.default, Any("k"), Literal([0, 1, 3, 2])))
_scaled = op(aten.mul.Tensor, _products, Number("scale"), name="scaled")

WEIGHTS = op(
    aten._softmax.default,
    Through(Alt((op(aten.add.Tensor, _scaled, Any("mask")), _scaled)), over=CAST),
    Literal(-1),
    Literal(False),
)

UNSEEN = {False: (), True: (True,)}
"""``nan_unseen`` of the op, by whether there is a mask: a softmax over hidden keys only is NaN."""

PATTERN = op(
    aten.matmul.default,
    Through(
        WEIGHTS,
        over=CAST,
        name="weights",
    ),
    Any("v"),
)


def check(match: Match, ctx: Context) -> Refusal | None:
    """Four-dimensional tensors of one dtype with equal batch and heads, and a mask that broadcasts to the scores."""
    q, k, v = shape(match["q"]), shape(match["k"]), shape(match["v"])
    if len(q) != 4 or q[:2] != k[:2] or k[:3] != v[:3] or q[3] != k[3]:
        return Refusal(f"q {list(q)}, k {list(k)}, v {list(v)} are not [B, N, S, D], [B, N, T, D], [B, N, T, Dv]",
                       match.anchor, "shape", "q [B, N, S, D], k [B, N, T, D], v [B, N, T, Dv]",
                       f"q {list(q)}, k {list(k)}, v {list(v)}", "give q, k and v four dims, batch and heads first")
    if len({dtype(match[n]) for n in ("q", "k", "v")} | {dtype(match["weights"]), dtype(match.anchor)}) > 1:
        found = ", ".join(f"{n} {dtype(match[n])}" for n in ("q", "k", "v", "weights"))
        return Refusal(f"the attention mixes dtypes: {found}, result {dtype(match.anchor)}", match.anchor, "dtype",
                       "one dtype for q, k, v, the weights and the result", found,
                       "cast the softmax back to the dtype of q before the product with v")
    mask = match.get("mask")
    if isinstance(mask, fx.Node) and not dtype(mask).is_floating_point:
        return added_refusal(mask)
    if mask is not None and (not isinstance(mask, fx.Node) or len(shape(mask)) != 4):
        place = mask if isinstance(mask, fx.Node) else match["scaled"]
        return Refusal("what is added to the scores is not a mask over [B, N, S, T]", place, "mask",
                       f"a mask that broadcasts to {[*q[:3], k[2]]}", describe(mask),
                       "give the mask four dims, [B or 1, N or 1, S, T]")
    if mask is not None and any(m not in (1, s) for m, s in zip(shape(mask), (*q[:3], k[2]), strict=True)):
        return Refusal(f"mask {list(shape(mask))} does not broadcast to the scores", mask, "mask",
                       f"a mask that broadcasts to {[*q[:3], k[2]]}", str(list(shape(mask))),
                       "make the mask as long as the keys: one column for each row of the cache")
    return None


def added_refusal(mask: fx.Node) -> Refusal:
    """The refusal of a ``mask`` that is added and of no floating-point dtype."""
    kind = describe(dtype(mask))
    return Refusal(f"a mask of {kind} is added to the scores: it hides no key, True adds 1", mask, "mask",
                   "a floating-point mask that is added, or a bool one that fills", describe(mask),
                   "hide keys with scores.masked_fill(hidden, float('-inf'))")


def rewrite(match: Match, ctx: Context) -> None:
    """Replace the weighted sum by the dialect op."""
    mask = match.get("mask")
    node = ctx.editor.call(
        torch.ops.cannopy.attention.default, match["q"], match["k"], match["v"], mask, float(match["scale"]), False,
        False, *UNSEEN[mask is not None],
    )
    ctx.editor.replace(match.anchor, node)


RULE = Rule(
    name="lift_attention",
    equation="softmax(q kᵀ scale + mask) v  →  attention(q, k, v, mask, scale)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    near=SILENT,
)
"""What comes near is told by the rule for any spelling."""
