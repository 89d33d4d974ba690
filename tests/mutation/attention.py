"""Mutations of attention and of its masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ATTENTION, Edit, NotHereError, Operator, calls, through


def attentions(p: Program) -> list[fx.Node]:
    """Every attention that is one node (q, k, v, mask, scale, causal, gqa)."""
    return calls(p, torch.ops.cannopy.attention.default)


def latent(p: Program) -> list[fx.Node]:
    """Those whose keys are two parts side by side: multi-head latent attention."""
    return [n for n in attentions(p) if is_call(n.args[0], aten.cat.default) and is_call(n.args[1], aten.cat.default)]


def _scale(e: Edit, n: fx.Node) -> None:
    e.set_arg(n, 4, n.args[4] * e.factor())


def _negative_scale(e: Edit, n: fx.Node) -> None:
    e.set_arg(n, 4, -n.args[4])


def _scale_on_k(e: Edit, n: fx.Node) -> None:
    """The factor multiplies the keys instead of the scores."""
    e.swap_input(n, n.args[1], e.before(n, aten.mul.Tensor, n.args[1], n.args[4]))
    e.set_arg(n, 4, 1.0)


def _scale_on_q(e: Edit, n: fx.Node) -> None:
    e.swap_input(n, n.args[0], e.before(n, aten.mul.Tensor, n.args[0], n.args[4]))
    e.set_arg(n, 4, 1.0)


def _q_scaled(e: Edit, n: fx.Node) -> None:
    e.swap_input(n, n.args[0], e.before(n, aten.mul.Tensor, n.args[0], e.factor()))


def _swap_q_parts(e: Edit, n: fx.Node) -> None:
    """[rope, nope] of q against [nope, rope] of k."""
    q: Any = n.args[0]
    a, b = q.args[0]
    e.become(q, aten.cat.default, [b, a], q.args[1])


def _swap_both_parts(e: Edit, n: fx.Node) -> None:
    """[rope, nope] of both: the same scores."""
    for node in n.args[:2]:
        a, b = node.args[0]  # type: ignore[union-attr, misc]
        e.become(node, aten.cat.default, [b, a], node.args[1])  # type: ignore[union-attr, arg-type]


def _k_as_v(e: Edit, n: fx.Node) -> None:
    size = shape(n.args[2])[-1]
    cut = e.before(n, aten.slice.Tensor, n.args[1], 3, 0, size)
    e.set_arg(n, 2, cut)


def _v_scaled(e: Edit, n: fx.Node) -> None:
    e.swap_input(n, n.args[2], e.before(n, aten.mul.Tensor, n.args[2], e.factor()))


def _v_first_row(e: Edit, n: fx.Node) -> None:
    """One head's values for all heads."""
    v: Any = n.args[2]
    if shape(v)[1] == 1:
        raise NotHereError
    one = e.before(n, aten.slice.Tensor, v, 1, 0, 1)
    e.swap_input(n, v, e.before(n, aten.expand.default, one, list(shape(v))))


def _k_first_head(e: Edit, n: fx.Node) -> None:
    k: Any = n.args[1]
    one = e.before(n, aten.slice.Tensor, k, 1, 0, 1)
    e.swap_input(n, k, e.before(n, aten.expand.default, one, list(shape(k))))


def _q_first_token(e: Edit, n: fx.Node) -> None:
    q: Any = n.args[0]
    if shape(q)[2] == 1:
        raise NotHereError
    one = e.before(n, aten.slice.Tensor, q, 2, 0, 1)
    e.swap_input(n, q, e.before(n, aten.expand.default, one, list(shape(q))))


def _rope_part_zero(e: Edit, n: fx.Node) -> None:
    q: Any = n.args[0]
    a, b = q.args[0]
    e.become(q, aten.cat.default, [a, e.before(q, aten.mul.Tensor, b, 0.0)], q.args[1])


def _split_moved(e: Edit, n: fx.Node) -> None:
    """Keys take the second part of kv_b's output, values the first."""
    keys: Any = n.args[1]
    part, rope = keys.args[0]
    value: Any = n.args[2]
    if not is_call(part, aten.slice.Tensor) or shape(part) != shape(value):
        raise NotHereError
    e.become(keys, aten.cat.default, [value, rope], keys.args[1])
    e.set_arg(n, 2, part)


def _other_kv_b(e: Edit, n: fx.Node) -> None:
    """kv_b_proj is computed from other weights."""
    linear = through(n.args[2], aten.slice.Tensor, aten.permute.default, aten.reshape.default)
    if not is_call(linear, aten.linear.default):
        raise NotHereError
    weight = linear.args[1]
    e.swap_input(linear, weight, e.before(linear, aten.mul.Tensor, weight, e.factor()))


def _kv_b_bias(e: Edit, n: fx.Node) -> None:
    linear = through(n.args[2], aten.slice.Tensor, aten.permute.default, aten.reshape.default)
    if not is_call(linear, aten.linear.default):
        raise NotHereError
    e.become(linear, aten.linear.default, *linear.args, e.argument(e.noise(shape(linear)[-1], dtype=dtype(linear))))


def _keys_added(e: Edit, n: fx.Node) -> None:
    """Something is added to the keys after the expansion."""
    e.swap_input(n, n.args[1], e.before(n, aten.add.Tensor, n.args[1], 0.25))


def _causal_flag(e: Edit, n: fx.Node) -> None:
    e.set_arg(n, 5, True)


def _result_read(e: Edit, n: fx.Node) -> None:
    e.returned(n)


def _masks(p: Program) -> list[fx.Node]:
    """The comparisons that make causal masks."""
    return calls(p, aten.le.Tensor, aten.ge.Tensor)


def _mask_shift(by: int) -> Any:
    def apply(e: Edit, n: fx.Node) -> None:
        right: Any = n.args[1]
        e.swap_input(n, right, e.before(n, aten.add.Tensor, right, by))

    return apply


def _mask_strict(e: Edit, n: fx.Node) -> None:
    e.become(n, aten.lt.Tensor, *n.args)


def _mask_flipped(e: Edit, n: fx.Node) -> None:
    e.become(n, aten.ge.Tensor, n.args[1], n.args[0])


def _mask_as_not(e: Edit, n: fx.Node) -> None:
    greater = e.before(n, aten.gt.Tensor, *n.args)
    e.become(n, aten.bitwise_not.default, greater)


def _mask_inverted(e: Edit, n: fx.Node) -> None:
    e.become(n, aten.ge.Tensor, *n.args)


def _mask_window(e: Edit, n: fx.Node) -> None:
    keys, queries = n.args
    low = e.before(n, aten.sub.Tensor, queries, e.rng.randint(3, 9))
    _combined(e, n, e.behind(n, aten.gt.Tensor, keys, low))


def _mask_padding(e: Edit, n: fx.Node) -> None:
    size = list(shape(n))
    visible = torch.ones([1] * (len(size) - 1) + [size[-1]], dtype=torch.bool)
    visible[..., : e.rng.randint(1, 6)] = False
    extra = e.argument(visible)
    _combined(e, n, extra)


def _combined(e: Edit, n: fx.Node, other: fx.Node) -> None:
    readers = [u for u in n.users if u is not other]
    both = e.behind(n if other.op == "placeholder" else other, aten.bitwise_and.Tensor, n, other)
    for reader in readers:
        e.swap_input(reader, n, both)


def _mask_first_row(e: Edit, n: fx.Node) -> None:
    """The first query's row for all queries."""
    size = shape(n)
    if size[-2] == 1:
        raise NotHereError
    row = e.after(n, aten.slice.Tensor, len(size) - 2, 0, 1, users=[])
    for reader in list(n.users):
        if reader is not row:
            e.swap_input(reader, n, row)


def _mask_expanded(e: Edit, n: fx.Node) -> None:
    """The first query's row, expanded to all: the shape looks right."""
    size = shape(n)
    if size[-2] == 1:
        raise NotHereError
    row = e.after(n, aten.slice.Tensor, len(size) - 2, 0, 1, users=[])
    wide = e.after(row, aten.expand.default, list(size), users=[])
    for reader in list(n.users):
        if reader not in (row, wide):
            e.swap_input(reader, n, wide)


def _mask_scaled_queries(e: Edit, n: fx.Node) -> None:
    right: Any = n.args[1]
    e.swap_input(n, right, e.before(n, aten.mul.Tensor, right, 2))


def _mask_of_attention_only(e: Edit, n: fx.Node) -> None:
    """Attention sees one key less than the indexer chose from."""
    attention = next(iter(attentions(e.program)), None)
    if attention is None:
        raise NotHereError
    mask: Any = attention.args[3]
    if not is_call(mask, aten.bitwise_and.Tensor):
        raise NotHereError
    e.swap_input(mask, n, e.behind(n, aten.lt.Tensor, *n.args))


def _mask_or(e: Edit, n: fx.Node) -> None:
    """Attention to the causal keys or the chosen ones."""
    attention = next(iter(attentions(e.program)), None)
    if attention is None or not is_call(attention.args[3], aten.bitwise_and.Tensor):
        raise NotHereError
    e.become(attention.args[3], aten.bitwise_or.Tensor, *attention.args[3].args)


def _mask_without_choice(e: Edit, n: fx.Node) -> None:
    """The indexer's choice is computed and not used."""
    attention = next(iter(attentions(e.program)), None)
    if attention is None or not is_call(attention.args[3], aten.bitwise_and.Tensor):
        raise NotHereError
    e.set_arg(attention, 3, n)


def fills(p: Program) -> list[fx.Node]:
    """masked_fill of floats by a very negative number: additive masks and indexer scores."""
    found = calls(p, aten.masked_fill.Scalar, aten.where.self)
    return [n for n in found if len(shape(n)) >= 3]


def _fill(value: float) -> Any:
    def apply(e: Edit, n: fx.Node) -> None:
        if not is_call(n, aten.masked_fill.Scalar):
            raise NotHereError
        e.set_arg(n, 2, value)

    return apply


def additive(p: Program) -> list[fx.Node]:
    """where(shown, 0, a very negative number): masks that are added to scores."""
    return [n for n in calls(p, aten.where.self) if len(shape(n)) >= 3 and is_call(n.args[2], aten.full.default)]


def _hidden(value: float) -> Any:
    """What hidden keys get, where the mask is one of numbers."""
    def apply(e: Edit, n: fx.Node) -> None:
        other: Any = n.args[2]
        e.swap_input(n, other, e.before(n, aten.full.default, [], value, dtype=dtype(n)))

    return apply


MASK = ("mask",)
OPERATORS = (
    Operator("attention_scale", ATTENTION, attentions, _scale, legal=True),
    Operator("attention_scale_negative", ATTENTION, attentions, _negative_scale, words=("scale",)),
    Operator("attention_scale_on_keys", ATTENTION, attentions, _scale_on_k, words=("mul", "cat"), same=True),
    Operator("attention_scale_on_queries", ATTENTION, attentions, _scale_on_q, words=("mul", "cat"), same=True),
    Operator("attention_queries_scaled", ATTENTION, attentions, _q_scaled, words=("mul", "cat")),
    Operator("attention_query_parts_swapped", ATTENTION, latent, _swap_q_parts, words=("q_nope", "q_rope", "shape")),
    Operator("attention_parts_swapped", ATTENTION, latent, _swap_both_parts, words=("cat", "slice", "index_copy"),
             same=True),
    Operator("attention_keys_as_values", ATTENTION, attentions, _k_as_v, words=("slice", "cat")),
    Operator("attention_values_scaled", ATTENTION, attentions, _v_scaled, words=("mul",)),
    Operator("attention_values_of_first_head", ATTENTION, attentions, _v_first_row, words=("expand", "slice")),
    Operator("attention_keys_of_first_head", ATTENTION, attentions, _k_first_head, words=("expand", "cat")),
    Operator("attention_query_of_first_token", ATTENTION, attentions, _q_first_token, words=("expand", "cat")),
    Operator("attention_rope_part_zero", ATTENTION, latent, _rope_part_zero, words=("mul", "rotary")),
    Operator("attention_keys_and_values_swapped", ATTENTION, latent, _split_moved, words=("slice", "nope")),
    Operator("attention_kv_b_computed", ATTENTION, latent, _other_kv_b, words=("kv_b", "weight")),
    Operator("attention_kv_b_bias", ATTENTION, latent, _kv_b_bias, words=("linear", "arguments")),
    Operator("attention_keys_added_to", ATTENTION, attentions, _keys_added, words=("add", "cat")),
    Operator("attention_causal_flag", ATTENTION, attentions, _causal_flag, words=("False", "True")),
    Operator("attention_result_returned", ATTENTION, attentions, _result_read, legal=True),
    Operator("mask_one_key_more", ATTENTION, _masks, _mask_shift(1), words=MASK),
    Operator("mask_one_key_less", ATTENTION, _masks, _mask_shift(-1), words=MASK),
    Operator("mask_strict", ATTENTION, _masks, _mask_strict, words=MASK),
    Operator("mask_comparison_turned", ATTENTION, _masks, _mask_flipped, legal=True, same=True),
    Operator("mask_as_negation", ATTENTION, _masks, _mask_as_not, legal=True, same=True),
    Operator("mask_inverted", ATTENTION, _masks, _mask_inverted, words=MASK),
    Operator("mask_window", ATTENTION, _masks, _mask_window, words=MASK),
    Operator("mask_padding", ATTENTION, _masks, _mask_padding, words=MASK),
    Operator("mask_of_first_query", ATTENTION, _masks, _mask_first_row, words=MASK),
    Operator("mask_of_first_query_expanded", ATTENTION, _masks, _mask_expanded, words=MASK),
    Operator("mask_steeper", ATTENTION, _masks, _mask_scaled_queries, words=MASK),
    Operator("mask_of_attention_differs", ATTENTION, _masks, _mask_of_attention_only, words=MASK),
    Operator("mask_or_choice", ATTENTION, _masks, _mask_or, words=("bitwise_or", "mask")),
    Operator("mask_ignores_choice", ATTENTION, _masks, _mask_without_choice, words=("bitwise_and", "mask", "le")),
    Operator("mask_fill_zero", ATTENTION, fills, _fill(0.0), words=("fill", "0.0", "inf")),
    Operator("mask_fill_small", ATTENTION, fills, _fill(-2.0), words=("fill", "-2.0", "inf")),
    Operator("mask_fill_fp16_lowest", ATTENTION, fills, _fill(-65504.0), words=("fill", "-65504", "inf"), same=True),
    Operator("mask_of_numbers_infinite", ATTENTION, additive, _hidden(-math.inf), words=("fill", "inf"), same=True),
    Operator("mask_of_numbers_zero", ATTENTION, additive, _hidden(0.0), words=("fill", "0.0", "mask")),
    Operator("mask_of_numbers_small", ATTENTION, additive, _hidden(-3.0), words=("fill", "-3.0", "mask")),
    Operator("mask_fill_positive", ATTENTION, fills, _fill(3.0), words=("fill", "3.0", "inf")),
)
