"""Mutations of the lightning indexer."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ATTENTION, Edit, NotHereError, Operator, calls, through, user


@dataclass
class Indexer:
    """The choice of keys."""

    products: fx.Node
    scaled: fx.Node
    relu: fx.Node
    weights: fx.Node
    scores: fx.Node
    masked: fx.Node
    topk: fx.Node
    scatter: fx.Node


def indexers(p: Program) -> list[Indexer]:
    """Every lightning indexer."""
    found = []
    for relu in calls(p, aten.relu.default):
        scaled = relu.args[0]
        if not is_call(scaled, aten.mul.Tensor):
            continue
        summed = user(relu, aten.matmul.default)
        weights = through(summed.args[0], aten.reshape.default)
        scores = user(summed, aten.reshape.default) or summed
        masked = user(scores, aten.masked_fill.Scalar, aten.add.Tensor)
        topk = user(masked, aten.topk.default)
        ids = user(topk, operator.getitem)
        scatter = user(ids, aten.scatter.value)
        found.append(Indexer(scaled.args[0], scaled, relu, weights, scores, masked, topk, scatter))
    return found


def _relu_dropped(e: Edit, i: Indexer) -> None:
    e.bypass(i.relu, i.scaled)


def _activation(target: Any) -> Any:
    def apply(e: Edit, i: Indexer) -> None:
        e.become(i.relu, target, i.scaled)

    return apply


def _relu_after(e: Edit, i: Indexer) -> None:
    """relu of the weighted sum instead of each head."""
    e.bypass(i.relu, i.scaled)
    e.after(i.scores, aten.relu.default)


def _relu_before_scale(e: Edit, i: Indexer) -> None:
    """relu, then the positive factor: the same."""
    factor = i.scaled.args[1]
    e.become(i.scaled, aten.relu.default, i.products)
    e.become(i.relu, aten.mul.Tensor, i.scaled, factor)


def _product_scale(e: Edit, i: Indexer) -> None:
    e.set_arg(i.scaled, 1, i.scaled.args[1] * e.factor())


def _product_scale_negative(e: Edit, i: Indexer) -> None:
    e.set_arg(i.scaled, 1, -i.scaled.args[1])


def _product_scale_dropped(e: Edit, i: Indexer) -> None:
    e.bypass(i.scaled, i.products)


def _head_scale(e: Edit, i: Indexer) -> None:
    e.set_arg(i.weights, 1, i.weights.args[1] * e.factor())


def _head_scale_negative(e: Edit, i: Indexer) -> None:
    e.set_arg(i.weights, 1, -i.weights.args[1])


def _head_scale_dropped(e: Edit, i: Indexer) -> None:
    e.bypass(i.weights, i.weights.args[0])


def _scale_on_scores(e: Edit, i: Indexer) -> None:
    """Both factors on the sum: the same order of keys."""
    a, b = i.scaled.args[1], i.weights.args[1]
    e.bypass(i.scaled, i.products)
    e.bypass(i.weights, i.weights.args[0])
    e.after(i.scores, aten.mul.Tensor, a * b)


def _one_head_weight(e: Edit, i: Indexer) -> None:
    """One head's weight for all heads."""
    size = shape(i.weights)
    one = e.after(i.weights, aten.slice.Tensor, len(size) - 1, 0, 1, users=[])
    wide = e.after(one, aten.expand.default, list(size), users=[])
    for reader in list(i.weights.users):
        if reader not in (one, wide):
            e.swap_input(reader, i.weights, wide)


def _weights_constant(e: Edit, i: Indexer) -> None:
    full = e.after(i.weights, aten.full_like.default, 0.5, users=[])
    for reader in list(i.weights.users):
        if reader is not full:
            e.swap_input(reader, i.weights, full)


def _weights_positive(e: Edit, i: Indexer) -> None:
    e.after(i.weights, aten.sigmoid.default)


def _score_bias(e: Edit, i: Indexer) -> None:
    """Keys get a bonus by position."""
    bonus = e.argument(e.noise(shape(i.scores)[-1], scale=e.typical(i.scores), dtype=dtype(i.scores)))
    e.after(i.scores, aten.add.Tensor, bonus)


def _score_constant(e: Edit, i: Indexer) -> None:
    """The same number on every score: the same order."""
    e.after(i.scores, aten.add.Tensor, 1.0)


def _scores_negated(e: Edit, i: Indexer) -> None:
    e.after(i.scores, aten.neg.default)


def _softmax_scores(e: Edit, i: Indexer) -> None:
    """Softmax over keys after the mask: monotone, but the pattern is another."""
    e.after(i.masked, aten._softmax.default, -1, False)


def _k(e: Edit, i: Indexer) -> None:
    e.set_arg(i.topk, 1, e.rng.choice([4, 8, 12, 20]))


def _smallest(e: Edit, i: Indexer) -> None:
    e.set_arg(i.topk, 3, False)


def _unsorted(e: Edit, i: Indexer) -> None:
    e.set_arg(i.topk, 4, False)


def _topk_dim(e: Edit, i: Indexer) -> None:
    size = shape(i.masked)
    dims = [d for d in range(len(size) - 1) if size[d] >= 1]
    e.set_arg(i.topk, 2, e.rng.choice(dims))
    e.set_arg(i.topk, 1, 1)


def _choice_inverted(e: Edit, i: Indexer) -> None:
    """The chosen keys are those that are hidden."""
    e.after(i.scatter, aten.bitwise_not.default)


def _choice_shifted(e: Edit, i: Indexer) -> None:
    ids: Any = i.scatter.args[2]
    length = shape(i.scores)[-1]
    plus = e.before(i.scatter, aten.add.Tensor, ids, 1)
    e.swap_input(i.scatter, ids, e.before(i.scatter, aten.remainder.Scalar, plus, length))


def _choice_of_first_query(e: Edit, i: Indexer) -> None:
    size = shape(i.scatter)
    if size[-2] == 1:
        raise NotHereError
    one = e.after(i.scatter, aten.slice.Tensor, len(size) - 2, 0, 1, users=[])
    wide = e.after(one, aten.expand.default, list(size), users=[])
    for reader in list(i.scatter.users):
        if reader not in (one, wide):
            e.swap_input(reader, i.scatter, wide)


def _choice_of_values(e: Edit, i: Indexer) -> None:
    """Keys with a positive score only."""
    positive = e.before(i.topk, aten.gt.Scalar, i.masked, 0.0)
    dropped = e.before(i.topk, aten.bitwise_not.default, positive)
    e.swap_input(i.topk, i.masked, e.before(i.topk, aten.masked_fill.Scalar, i.masked, dropped, float("-inf")))


def _hadamard(e: Edit, i: Indexer) -> None:
    """An orthogonal rotation of the queries and the keys: the same products."""
    q = i.products.args[0]
    dim = shape(q)[-1]
    basis, _ = torch.linalg.qr(e.noise(dim, dim))
    rotation = e.argument(basis.to(dtype(q)))
    e.swap_input(i.products, q, e.before(i.products, aten.matmul.default, q, rotation))


def _query_bf16(e: Edit, i: Indexer) -> None:
    """Products of rounded queries."""
    q: Any = i.products.args[0]
    narrow = e.before(i.products, aten._to_copy.default, q, dtype=torch.float16)
    e.swap_input(i.products, q, e.before(i.products, aten._to_copy.default, narrow, dtype=dtype(q)))


def _query_of_first_head(e: Edit, i: Indexer) -> None:
    q: Any = i.products.args[0]
    one = e.before(i.products, aten.slice.Tensor, q, 2, 0, 1)
    e.swap_input(i.products, q, e.before(i.products, aten.expand.default, one, list(shape(q))))


def _indexer_mask(e: Edit, i: Indexer) -> None:
    """The indexer chooses among all keys of the cache."""
    e.bypass(i.masked, i.scores)


def _picks_returned(e: Edit, i: Indexer) -> None:
    e.returned(user(i.topk, operator.getitem))


SCORES = ("relu", "scale", "topk", "index")
OPERATORS = (
    Operator("indexer_without_relu", ATTENTION, indexers, _relu_dropped, words=SCORES),
    Operator("indexer_gelu", ATTENTION, indexers, _activation(aten.gelu.default), words=("gelu",)),
    Operator("indexer_silu", ATTENTION, indexers, _activation(aten.silu.default), words=("silu",)),
    Operator("indexer_absolute", ATTENTION, indexers, _activation(aten.abs.default), words=("abs",)),
    Operator("indexer_relu_of_sum", ATTENTION, indexers, _relu_after, words=("relu",)),
    Operator("indexer_relu_before_scale", ATTENTION, indexers, _relu_before_scale, legal=True, same=True),
    Operator("indexer_scale", ATTENTION, indexers, _product_scale, legal=True, same=True),
    Operator("indexer_scale_negative", ATTENTION, indexers, _product_scale_negative, words=("scale",)),
    Operator("indexer_scale_dropped", ATTENTION, indexers, _product_scale_dropped, legal=True, same=True),
    Operator("indexer_head_scale", ATTENTION, indexers, _head_scale, legal=True, same=True),
    Operator("indexer_head_scale_negative", ATTENTION, indexers, _head_scale_negative, words=("scale",)),
    Operator("indexer_head_scale_dropped", ATTENTION, indexers, _head_scale_dropped, legal=True, same=True),
    Operator("indexer_scales_on_scores", ATTENTION, indexers, _scale_on_scores, legal=True, same=True),
    Operator("indexer_one_head_weight", ATTENTION, indexers, _one_head_weight, words=("expand", "head_weight")),
    Operator("indexer_constant_weights", ATTENTION, indexers, _weights_constant, words=("full",)),
    Operator("indexer_weights_positive", ATTENTION, indexers, _weights_positive, words=("sigmoid",)),
    Operator("indexer_key_bonus", ATTENTION, indexers, _score_bias, words=("add",)),
    Operator("indexer_score_constant", ATTENTION, indexers, _score_constant, words=("add",), same=True),
    Operator("indexer_scores_negated", ATTENTION, indexers, _scores_negated, words=("neg",)),
    Operator("indexer_softmax", ATTENTION, indexers, _softmax_scores, words=("softmax",), same=True),
    Operator("indexer_k", ATTENTION, indexers, _k, legal=True),
    Operator("indexer_smallest", ATTENTION, indexers, _smallest, words=("False", "largest", "topk")),
    Operator("indexer_unsorted", ATTENTION, indexers, _unsorted, legal=True, same=True),
    Operator("indexer_topk_over_queries", ATTENTION, indexers, _topk_dim, words=("topk", "-1", "arguments")),
    Operator("indexer_choice_inverted", ATTENTION, indexers, _choice_inverted, words=("bitwise_not", "scatter")),
    Operator("indexer_choice_off_by_one", ATTENTION, indexers, _choice_shifted, words=("remainder", "getitem")),
    Operator("indexer_choice_of_first_query", ATTENTION, indexers, _choice_of_first_query, words=("expand", "slice")),
    Operator("indexer_positive_scores_only", ATTENTION, indexers, _choice_of_values, words=("masked_fill", "gt")),
    Operator("indexer_hadamard_of_queries", ATTENTION, indexers, _hadamard, words=("matmul", "index_query")),
    Operator("indexer_query_fp16", ATTENTION, indexers, _query_bf16, words=("float16", "dtype", "_to_copy"),
             same=True),
    Operator("indexer_query_of_first_head", ATTENTION, indexers, _query_of_first_head, words=("expand", "query")),
    Operator("indexer_without_mask", ATTENTION, indexers, _indexer_mask, words=("masked_fill", "mask")),
    Operator("indexer_picks_returned", ATTENTION, indexers, _picks_returned, legal=True),
)
