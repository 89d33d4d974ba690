"""What the lightning indexer computes, as patterns: scores of keys, the top-k among the visible ones, a mask of these.

    score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s]);  picks = topk(where(visible, score, -inf), k)

A positive factor on the products, the weights or the sum leaves the order of the keys as it is, so the operator is
called without any.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Literal, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Refusal
from cannopy.fusion_rules.engine.spellings import CAST, RESHAPE, wrong_shape
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, where

MINUS_INF = float("-inf")
SCALES = ("index_scale", "relu_scale", "head_scale", "score_scale")


def widened(value: Pattern) -> Pattern:
    """``value``, cast to fp32 or not."""
    return Alt((op(aten._to_copy.default, value, dtype=Literal(torch.float32)), value))


def scores(keys: Pattern) -> Pattern:
    """[B, S, L] over ``keys`` [B, 1, dim, L], with the names that `wrong_layout` and `not_positive` read."""
    products = op(aten.matmul.default, widened(Through(Any("index_query"), over=())), keys, name="index_products")
    scaled = Alt((op(aten.mul.Tensor, products, Number("index_scale"), commutative=True), products))
    relu = op(aten.relu.default, scaled, name="per_head")
    per_head = Alt((relu, op(aten.mul.Tensor, relu, Number("relu_scale"), commutative=True)))
    weight = widened(Any("head_weight"))
    weights = Alt((
        Through(op(aten.mul.Tensor, weight, Number("head_scale"), commutative=True), over=RESHAPE, name="weights"),
        op(aten.reshape.default, weight, Any(), name="weights"),
    ))
    summed = Through(op(aten.matmul.default, weights, per_head), over=RESHAPE)
    return Alt((Through(summed, name="scores"), Through(op(aten.mul.Tensor, summed, Number("score_scale")),
                                                        name="scores")))


def picks(keys: Pattern) -> Pattern:
    """int [B, S, k]: the best visible keys, with the names of the top-k and of what masks the scores."""
    found = scores(keys)
    other = (op(aten.masked_fill.Scalar, found, Any(), Number(), name="other_mask"),
             op(aten.add.Tensor, found, Any(), commutative=True, name="other_mask"))
    once = Alt((found, *other))
    masked = Alt((
        op(aten.masked_fill.Scalar, once, op(aten.bitwise_not.default, Any("index_mask")), Literal(MINUS_INF),
           name="masked"),
        op(aten.add.Tensor, once, Any("index_mask"), name="masked"),
    ))
    topk_args = (masked, Number("count"))
    topk = Alt((
        op(aten.topk.default, *topk_args, name="topk"),
        op(aten.topk.default, *topk_args, Literal(-1), name="topk"),
        op(aten.topk.default, *topk_args, Literal(-1), Literal(True), Any("sorted"), name="topk"),
    ))
    return Through(op(operator.getitem, topk, Literal(1)), over=CAST, name="picks")


def marked(keys: Pattern, value: bool) -> Op:
    """bool [B, S, L]: ``value`` at the picks, the opposite elsewhere."""
    others = op(aten.full.default, Any(), Literal(not value), rest=True)
    return op(aten.scatter.value, others, Literal(-1), picks(keys), Literal(value))


def wrong_layout(match: Match, batch: int, queries: int, length: int, key: tuple[int, ...],
                 others: Sequence[tuple[str, tuple[int, ...]]] = ()) -> Refusal | None:
    """A refusal unless every tensor of the indexer has the shape that the formula needs; keys have shape ``key``.

    ``others``: what else has to have which shape, by name.
    """
    heads, dim = shape(match["index_query"])[-2:]
    wanted = [
        *others,
        ("index_key", key),
        ("index_query", (batch, queries, heads, dim)),
        ("index_products", (batch, queries, heads, length)),
        ("head_weight", (batch, queries, heads)),
        ("weights", (batch, queries, 1, heads)),
        ("scores", (batch, queries, length)),
        ("picks", (batch, queries, match["count"])),
    ]
    for name, size in wanted:
        if shape(match[name]) != size:
            return wrong_shape(name, match[name], str(list(size)))
    return None


def wrong_mask(match: Match) -> Refusal | None:
    """A refusal when the scores have a mask in front of the causal one, or a bool is added to them."""
    other, masked, mask = match.get("other_mask"), match["masked"], match["index_mask"]
    if other is not None:
        return Refusal(f"the scores of the indexer are masked twice: by {describe(other)} ({where(other)}) and by "
                       f"{describe(masked)} ({where(masked)})", other, "mask", "one causal mask", "two masks",
                       "choose among all keys that the causal mask leaves: no other mask on top")
    if is_call(masked, aten.add.Tensor) and not (isinstance(mask, fx.Node) and dtype(mask).is_floating_point):
        return Refusal(f"what is added to the scores of the indexer is {describe(mask)}, no mask of -inf", masked,
                       "mask", "0 for a visible key, -inf for a hidden one", describe(mask),
                       "fill the scores of hidden keys with -inf")
    return None


def not_positive(match: Match) -> Refusal | None:
    """A refusal when a factor would turn the order of the keys around."""
    for name in SCALES:
        if not match.get(name, 1) > 0:
            return Refusal(f"{name} is {match[name]}: only a positive factor leaves the top-k unchanged",
                           match["per_head"], "constant", f"{name} > 0", f"{match[name]:g}", "use a positive scale")
    return None
