"""Mutations of the router: scores and choice of groups and experts."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ROUTER, Edit, NotHereError, Operator, calls, user


@dataclass
class Router:
    """A router; what the softmax form lacks is None."""

    logits: fx.Node
    scores: fx.Node
    topk: fx.Node
    ids: fx.Node
    picked: fx.Node
    biased: fx.Node | None = None
    masked: fx.Node | None = None
    grouped: fx.Node | None = None
    best: fx.Node | None = None
    group_sum: fx.Node | None = None
    group_topk: fx.Node | None = None
    total: fx.Node | None = None
    eps: fx.Node | None = None
    div: fx.Node | None = None
    scaled: fx.Node | None = None


def routers(p: Program) -> list[Router]:
    """Every router."""
    return [*_sigmoid(p), *_softmax(p)]


def _sigmoid(p: Program) -> list[Router]:
    found = []
    for scores in calls(p, aten.sigmoid.default):
        biased, picked = user(scores, aten.add.Tensor), user(scores, aten.gather.default)
        if biased is None or picked is None:
            continue
        ids = picked.args[2]
        topk = ids.args[0]
        grouped = user(biased, aten.reshape.default)
        best = user(grouped, aten.topk.default)
        group_sum = user(user(best, operator.getitem), aten.sum.dim_IntList)
        total = user(picked, aten.sum.dim_IntList)
        eps = user(total, aten.add.Tensor)
        div = user(picked, aten.div.Tensor)
        found.append(Router(scores.args[0], scores, topk, ids, picked, biased, topk.args[0], grouped, best, group_sum,
                            user(group_sum, aten.topk.default), total, eps, div, user(div, aten.mul.Tensor)))
    return found


def _softmax(p: Program) -> list[Router]:
    found = []
    for scores in calls(p, aten._softmax.default):
        topk = user(scores, aten.topk.default)
        if topk is None:
            continue
        parts = {n.args[1]: n for n in topk.users}
        if {0, 1} <= set(parts):
            found.append(Router(scores.args[0], scores, topk, parts[1], parts[0]))
    return found


def biased(p: Program) -> list[Router]:
    """Routers with sigmoid scores, a bias and groups."""
    return _sigmoid(p)


def _weights_from_biased(e: Edit, r: Router) -> None:
    e.swap_input(r.picked, r.scores, e.rng.choice([r.biased, r.masked]))


def _weights_are_values(e: Edit, r: Router) -> None:
    """The top-k's own values, which are biased scores."""
    e.bypass(r.picked, e.before(r.picked, operator.getitem, r.topk, 0))


def _no_bias(e: Edit, r: Router) -> None:
    e.bypass(r.biased, r.scores)


def _bias_subtracted(e: Edit, r: Router) -> None:
    e.become(r.biased, aten.sub.Tensor, *r.biased.args)


def _bias_swapped(e: Edit, r: Router) -> None:
    e.become(r.biased, aten.add.Tensor, r.biased.args[1], r.biased.args[0])


def _bias_on_logits(e: Edit, r: Router) -> None:
    bias = r.biased.args[1]
    moved = e.before(r.scores, aten.add.Tensor, r.logits, bias)
    scores = e.before(r.biased, aten.sigmoid.default, moved)
    r.scores.append(moved)
    moved.append(scores)
    e.bypass(r.biased, scores)


def _bias_everywhere(e: Edit, r: Router) -> None:
    """The bias changes the scores themselves, so the weights too."""
    bias = r.biased.args[1]
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten.add.Tensor, r.logits, bias))
    e.bypass(r.biased, r.scores)


def _bias_one_entry(e: Edit, r: Router) -> None:
    bias = r.biased.args[1]
    e.swap_input(r.biased, bias, e.before(r.biased, aten.slice.Tensor, bias, 0, 0, 1))


def _bias_number(e: Edit, r: Router) -> None:
    e.become(r.biased, aten.add.Tensor, r.scores, 0.7)


def _bias_per_token(e: Edit, r: Router) -> None:
    tokens, experts = shape(r.scores)
    e.swap_input(r.biased, r.biased.args[1], e.argument(e.noise(tokens, e.rng.choice([1, experts]), scale=0.3)))


def _bias_leading_dim(e: Edit, r: Router) -> None:
    bias = r.biased.args[1]
    e.swap_input(r.biased, bias, e.before(r.biased, aten.reshape.default, bias, [1, *shape(bias)]))


def _bias_rounded(e: Edit, r: Router) -> None:
    bias = r.biased.args[1]
    e.swap_input(r.biased, bias, e.before(r.biased, aten._to_copy.default, bias, dtype=torch.bfloat16))


def _bias_computed(e: Edit, r: Router) -> None:
    bias = r.biased.args[1]
    e.swap_input(r.biased, bias, e.before(r.biased, aten.mul.Tensor, bias, e.factor()))


def _softmax_scores(e: Edit, r: Router) -> None:
    e.become(r.scores, aten._softmax.default, r.logits, -1, False)


def _tanh_scores(e: Edit, r: Router) -> None:
    e.become(r.scores, aten.tanh.default, r.logits)


def _sigmoid_scores(e: Edit, r: Router) -> None:
    if is_call(r.scores, aten.sigmoid.default):
        raise NotHereError
    e.become(r.scores, aten.sigmoid.default, r.logits)


def _temperature(e: Edit, r: Router) -> None:
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten.mul.Tensor, r.logits, e.factor()))


def _noise(e: Edit, r: Router) -> None:
    noise = e.argument(e.noise(*shape(r.logits), dtype=dtype(r.logits)))
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten.add.Tensor, r.logits, noise))


def _scores_scaled(e: Edit, r: Router) -> None:
    e.after(r.scores, aten.mul.Tensor, e.factor())


def _scores_rounded(e: Edit, r: Router) -> None:
    """The choice is made on bf16 logits."""
    narrow = e.before(r.scores, aten._to_copy.default, r.logits, dtype=torch.bfloat16)
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten._to_copy.default, narrow, dtype=dtype(r.logits)))


def _softmax_dim(e: Edit, r: Router) -> None:
    if not is_call(r.scores, aten._softmax.default):
        raise NotHereError
    e.set_arg(r.scores, 1, 0)


def _softmax_after(e: Edit, r: Router) -> None:
    """Top-k first, softmax over the chosen logits afterwards."""
    if not is_call(r.scores, aten._softmax.default):
        raise NotHereError
    e.swap_input(r.topk, r.scores, r.logits)
    e.editor.refresh(r.topk)
    e.after(r.picked, aten._softmax.default, -1, False)


def _k(e: Edit, r: Router) -> None:
    """One expert more is chosen and the first dropped: the shapes stay."""
    k = r.topk.args[1]
    e.set_arg(r.topk, 1, k + 1)
    e.editor.refresh(r.topk)
    for node in list(r.topk.users):
        e.editor.refresh(node)
        e.after(node, aten.slice.Tensor, 1, 1, k + 1, 1)


def _smallest(e: Edit, r: Router) -> None:
    e.set_arg(r.topk, 3, False)


def _sorted_flag(e: Edit, r: Router) -> None:
    e.set_arg(r.topk, 4, True)


def _groups_smallest(e: Edit, r: Router) -> None:
    e.set_arg(r.group_topk, 3, False)


def _group_best(e: Edit, r: Router) -> None:
    e.become(r.group_sum, aten.amax.default, r.grouped, [-1])


def _group_max(e: Edit, r: Router) -> None:
    best = e.before(r.group_sum, aten.max.dim, r.grouped, -1)
    e.bypass(r.group_sum, e.before(r.group_sum, operator.getitem, best, 0))


def _group_top(e: Edit, r: Router) -> None:
    e.set_arg(r.best, 1, e.rng.choice([1, 3, shape(r.grouped)[-1]]))


def _group_mean(e: Edit, r: Router) -> None:
    e.become(r.group_sum, aten.mean.dim, r.group_sum.args[0], [-1])


def _group_smallest_of(e: Edit, r: Router) -> None:
    e.set_arg(r.best, 3, False)


def _k_group(e: Edit, r: Router) -> None:
    groups = shape(r.group_sum)[-1]
    e.set_arg(r.group_topk, 1, e.rng.choice([k for k in range(1, groups + 1) if k != r.group_topk.args[1]]))


def _group_of_scores(e: Edit, r: Router) -> None:
    """Groups compete by unbiased scores."""
    e.swap_input(r.grouped, r.biased, r.scores)


def _interleaved_groups(e: Edit, r: Router) -> None:
    """Group g has experts g, g + G, …"""
    tokens, groups, each = shape(r.grouped)
    e.become(r.grouped, aten.reshape.default, r.biased, [tokens, each, groups])
    e.editor.refresh(r.grouped)
    e.after(r.grouped, aten.permute.default, [0, 2, 1])


def _fill(value: float) -> Any:
    def apply(e: Edit, r: Router) -> None:
        e.set_arg(r.masked, 2, value)

    return apply


def _mask_inverted(e: Edit, r: Router) -> None:
    dropped = r.masked.args[1]
    e.swap_input(r.masked, dropped, e.before(r.masked, aten.bitwise_not.default, dropped))


def _mask_shifted(e: Edit, r: Router) -> None:
    dropped = r.masked.args[1]
    e.swap_input(r.masked, dropped, e.before(r.masked, aten.roll.default, dropped, [1], [1]))


def _unmasked(e: Edit, r: Router) -> None:
    e.bypass(r.masked, r.biased)


def _mask_of_scores(e: Edit, r: Router) -> None:
    """The choice inside the groups is made on unbiased scores."""
    e.swap_input(r.masked, r.biased, r.scores)


SIG = biased
BIAS = ("bias",)
OPERATORS = (
    Operator("router_weights_from_biased", ROUTER, SIG, _weights_from_biased, words=BIAS),
    Operator("router_weights_are_topk_values", ROUTER, SIG, _weights_are_values, words=BIAS),
    Operator("router_without_bias", ROUTER, SIG, _no_bias, legal=True),
    Operator("router_bias_subtracted", ROUTER, SIG, _bias_subtracted, words=(*BIAS, "sub")),
    Operator("router_bias_swapped", ROUTER, SIG, _bias_swapped, legal=True, same=True),
    Operator("router_bias_on_logits", ROUTER, SIG, _bias_on_logits, words=("bias", "weights")),
    Operator("router_bias_everywhere", ROUTER, SIG, _bias_everywhere, legal=True),
    Operator("router_bias_one_entry", ROUTER, SIG, _bias_one_entry, words=BIAS, same=True),
    Operator("router_bias_number", ROUTER, SIG, _bias_number, words=BIAS),
    Operator("router_bias_per_token", ROUTER, SIG, _bias_per_token, words=BIAS),
    Operator("router_bias_leading_dim", ROUTER, SIG, _bias_leading_dim, legal=True, same=True),
    Operator("router_bias_bf16", ROUTER, SIG, _bias_rounded, words=BIAS, same=True),
    Operator("router_bias_computed", ROUTER, SIG, _bias_computed, legal=True),
    Operator("router_softmax", ROUTER, SIG, _softmax_scores, words=("softmax",)),
    Operator("router_tanh", ROUTER, SIG, _tanh_scores, words=("tanh",)),
    Operator("router_sigmoid", ROUTER, routers, _sigmoid_scores, words=("sigmoid",)),
    Operator("router_temperature", ROUTER, routers, _temperature, legal=True),
    Operator("router_noise", ROUTER, routers, _noise, legal=True),
    Operator("router_scores_scaled", ROUTER, routers, _scores_scaled, words=("mul", "scores")),
    Operator("router_logits_rounded", ROUTER, routers, _scores_rounded, legal=True, same=True),
    Operator("router_softmax_over_tokens", ROUTER, routers, _softmax_dim, words=("softmax",)),
    Operator("router_softmax_after_choice", ROUTER, routers, _softmax_after, words=("softmax",)),
    Operator("router_drops_first_choice", ROUTER, routers, _k, words=("slice",)),
    Operator("router_smallest", ROUTER, routers, _smallest, words=("largest",)),
    Operator("router_sorted", ROUTER, routers, _sorted_flag, legal=True, same=True),
    Operator("router_groups_smallest", ROUTER, SIG, _groups_smallest, words=("largest",)),
    Operator("router_group_amax", ROUTER, SIG, _group_best, legal=True),
    Operator("router_group_max", ROUTER, SIG, _group_max, legal=True),
    Operator("router_group_top_n", ROUTER, SIG, _group_top, words=("best",)),
    Operator("router_group_mean", ROUTER, SIG, _group_mean, words=("mean",), same=True),
    Operator("router_group_smallest_two", ROUTER, SIG, _group_smallest_of, words=("best", "largest")),
    Operator("router_k_group", ROUTER, SIG, _k_group, legal=True),
    Operator("router_group_of_unbiased", ROUTER, SIG, _group_of_scores, words=("choice", "grouped", "scores")),
    Operator("router_interleaved_groups", ROUTER, SIG, _interleaved_groups, words=("permute", "groups")),
    Operator("router_fill_zero", ROUTER, SIG, _fill(0.0), words=("0.0", "score")),
    Operator("router_fill_lowest", ROUTER, SIG, _fill(-3e38), words=("score",), same=True),
    Operator("router_fill_minus_one", ROUTER, SIG, _fill(-0.6), words=("score",)),
    Operator("router_fill_positive", ROUTER, SIG, _fill(2.0), words=("score",)),
    Operator("router_mask_inverted", ROUTER, SIG, _mask_inverted, words=("bitwise_not", "scatter", "reshape")),
    Operator("router_mask_off_by_one", ROUTER, SIG, _mask_shifted, words=("roll",)),
    Operator("router_mask_dropped", ROUTER, SIG, _unmasked, legal=True),
    Operator("router_choice_of_unbiased", ROUTER, SIG, _mask_of_scores, words=("choice", "scores", "grouped")),
)
