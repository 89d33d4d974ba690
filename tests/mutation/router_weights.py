"""Mutations of the weights that the router gives."""

from __future__ import annotations

import torch

from cannopy.fx_passes.graph import aten, is_call, shape
from tests.mutation.operators import ROUTER, Edit, NotHereError, Operator
from tests.mutation.router import Router, biased, routers


def _renorm_dropped(e: Edit, r: Router) -> None:
    e.bypass(r.div, r.picked)


def _renorm_added(e: Edit, r: Router) -> None:
    if r.div is not None:
        raise NotHereError
    readers = list(r.picked.users)
    total = e.behind(r.picked, aten.sum.dim_IntList, r.picked, [-1], True)
    new = e.behind(total, aten.div.Tensor, r.picked, total)
    for reader in readers:
        e.swap_input(reader, r.picked, new)


def _renorm_eps(e: Edit, r: Router) -> None:
    e.set_arg(r.eps, 1, e.typical(r.total) * e.rng.uniform(0.2, 2))


def _renorm_without_eps(e: Edit, r: Router) -> None:
    e.bypass(r.eps, r.total)


def _renorm_clamp(e: Edit, r: Router) -> None:
    e.become(r.eps, aten.clamp_min.default, r.total, e.typical(r.total))


def _renorm_over_all(e: Edit, r: Router) -> None:
    e.swap_input(r.total, r.picked, r.scores)


def _renorm_over_tokens(e: Edit, r: Router) -> None:
    e.set_arg(r.total, 1, [0])


def _renorm_by_largest(e: Edit, r: Router) -> None:
    e.become(r.total, aten.amax.default, r.picked, [-1], True)


def _renorm_by_norm(e: Edit, r: Router) -> None:
    squares = e.before(r.total, aten.mul.Tensor, r.picked, r.picked)
    e.swap_input(r.total, r.picked, squares)


def _scale(e: Edit, r: Router) -> None:
    if r.scaled is None:
        e.after(r.picked, aten.mul.Tensor, e.factor())
    else:
        e.set_arg(r.scaled, 1, e.factor())


def _scale_dropped(e: Edit, r: Router) -> None:
    e.bypass(r.scaled, r.div)


def _scale_before_renorm(e: Edit, r: Router) -> None:
    """The factor on the numerator: the same product."""
    factor = r.scaled.args[1]
    e.bypass(r.scaled, r.div)
    e.swap_input(r.div, r.picked, e.before(r.div, aten.mul.Tensor, r.picked, factor))


def _scale_before_choice(e: Edit, r: Router) -> None:
    """The factor on all scores before the choice, so that it cancels in the quotient."""
    factor = r.scaled.args[1]
    e.bypass(r.scaled, r.div)
    e.after(r.scores, aten.mul.Tensor, factor)


def _scale_tensor(e: Edit, r: Router) -> None:
    e.set_arg(r.scaled, 1, e.argument(e.noise(shape(r.div)[1]).abs() + 0.5))


def _scale_swapped(e: Edit, r: Router) -> None:
    """A 0-dim constant on the left instead of a number."""
    full = e.before(r.scaled, aten.full.default, [], r.scaled.args[1], dtype=torch.float32)
    e.become(r.scaled, aten.mul.Tensor, full, r.div)


def _scale_negative(e: Edit, r: Router) -> None:
    e.set_arg(r.scaled, 1, -r.scaled.args[1])


def _scale_inverse(e: Edit, r: Router) -> None:
    e.become(r.scaled, aten.div.Tensor, r.div, e.factor())


def _weights_squared(e: Edit, r: Router) -> None:
    last = r.scaled or r.picked
    squared = e.after(last, aten.mul.Tensor, last, users=[])
    for reader in list(last.users):
        if reader is not squared:
            e.swap_input(reader, last, squared)


def _ids_shifted(e: Edit, r: Router) -> None:
    experts = shape(r.scores)[1]
    readers = [u for u in r.ids.users if u is not r.picked]
    plus = e.after(r.ids, aten.add.Tensor, 1, users=[])
    wrapped = e.after(plus, aten.remainder.Scalar, experts, users=[])
    for reader in readers:
        e.swap_input(reader, r.ids, wrapped)


def _ids_shifted_for_weights(e: Edit, r: Router) -> None:
    experts = shape(r.scores)[1]
    if not is_call(r.picked, aten.gather.default):
        raise NotHereError
    plus = e.before(r.picked, aten.add.Tensor, r.ids, 1)
    e.swap_input(r.picked, r.ids, e.before(r.picked, aten.remainder.Scalar, plus, experts))


def _all_equal(e: Edit, r: Router) -> None:
    """Every logit of a token alike: only ties."""
    tokens, experts = shape(r.logits)
    one = e.before(r.scores, aten.slice.Tensor, r.logits, 1, 0, 1)
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten.expand.default, one, [tokens, experts]))


def _underflow(e: Edit, r: Router) -> None:
    """Scores so small that their sum underflows next to any eps."""
    e.swap_input(r.scores, r.logits, e.before(r.scores, aten.sub.Tensor, r.logits, e.rng.choice([60.0, 120.0])))


SIG = biased
SUM = ("sum", "div", "norm_type", "picked")
OPERATORS = (
    Operator("router_renorm_dropped", ROUTER, SIG, _renorm_dropped, words=SUM),
    Operator("router_renorm_added", ROUTER, routers, _renorm_added, words=SUM),
    Operator("router_renorm_eps", ROUTER, SIG, _renorm_eps, legal=True),
    Operator("router_renorm_without_eps", ROUTER, SIG, _renorm_without_eps, legal=True, same=True),
    Operator("router_renorm_clamped", ROUTER, SIG, _renorm_clamp, words=("clamp", *SUM)),
    Operator("router_renorm_over_all", ROUTER, SIG, _renorm_over_all, words=SUM),
    Operator("router_renorm_over_tokens", ROUTER, SIG, _renorm_over_tokens, words=SUM),
    Operator("router_renorm_by_largest", ROUTER, SIG, _renorm_by_largest, words=("amax", *SUM)),
    Operator("router_renorm_by_squares", ROUTER, SIG, _renorm_by_norm, words=("mul", *SUM)),
    Operator("router_scale", ROUTER, routers, _scale, legal=True),
    Operator("router_scale_dropped", ROUTER, SIG, _scale_dropped, legal=True),
    Operator("router_scale_before_renorm", ROUTER, SIG, _scale_before_renorm, words=("mul", "div"), same=True),
    Operator("router_scale_before_choice", ROUTER, SIG, _scale_before_choice, words=("mul", "bias", "scores")),
    Operator("router_scale_per_rank", ROUTER, SIG, _scale_tensor, legal=True),
    Operator("router_scale_constant_tensor", ROUTER, SIG, _scale_swapped, legal=True, same=True),
    Operator("router_scale_negative", ROUTER, SIG, _scale_negative, legal=True),
    Operator("router_scale_as_quotient", ROUTER, SIG, _scale_inverse, legal=True),
    Operator("router_weights_squared", ROUTER, routers, _weights_squared, legal=True),
    Operator("router_ids_off_by_one", ROUTER, routers, _ids_shifted, legal=True),
    Operator("router_weights_of_next_expert", ROUTER, routers, _ids_shifted_for_weights, words=("remainder", "topk")),
    Operator("router_all_logits_equal", ROUTER, routers, _all_equal, legal=True, same=True),
    Operator("router_scores_underflow", ROUTER, routers, _underflow, legal=True),
)
