"""Zero experts: pairs of token and expert whose expert number is E or more add the token itself (LongCat).

    y = Σ_k [id < E] w · expert(id, x)  +  x · Σ_k [id >= E] w

Models compute the first sum over all pairs, with the number 0 and the weight 0 where the expert is a zero expert: every
such token visits expert 0 for nothing. The device leaves those pairs out when it is told the range of experts that have
weights, so the rules of the experts ask here for the numbers and weights before they were masked.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape, truncates
from cannopy.fx_passes.normalise.constants import constant
from cannopy.fx_passes.normalise.indices import largest

NOTS = (aten.bitwise_not.default, aten.logical_not.default)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Split:
    """``ids < bound`` where ``below``, else ``ids >= bound``."""

    ids: fx.Node
    bound: int
    below: bool


@dataclass(frozen=True)
class Masked:
    """``source`` where ``kept`` holds, zero elsewhere."""

    source: fx.Node
    kept: Split


@dataclass(frozen=True)
class Unmasked:
    """Expert numbers below ``choices`` and their weights, as the router gave them."""

    ids: fx.Node
    scales: fx.Node
    choices: int


def before(node: fx.Node, *targets: Any) -> fx.Node:
    """What ``node`` was before any number of calls of ``targets``; casts to integers change values and end it."""
    while is_call(node, *targets) and not truncates(node):
        node = cast(fx.Node, node.args[0])
    return node


def whole_ids(node: fx.Node) -> fx.Node:
    """Expert numbers before reshapes and casts between integers."""
    while is_call(node, aten.reshape.default) or (
            is_call(node, aten._to_copy.default) and dtype(cast(fx.Node, node.args[0])) in INTEGERS):
        node = cast(fx.Node, node.args[0])
    return node


def unmasked(ids: fx.Node, scales: fx.Node, experts: int) -> Unmasked | None:
    """The operands of ``experts`` experts before zero experts were masked out of both; None where they were not.

    How many experts can be chosen must be known from the router, or a number could be out of the device op's range.
    """
    masked_ids, masked_scales = masked(ids), masked(scales)
    if masked_ids is None or masked_scales is None:
        return None
    found = whole_ids(masked_ids.source)
    wanted = Split(found, experts, True)
    if (masked_ids.kept, masked_scales.kept) != (wanted, wanted):
        return None
    choices = number_of_choices(found)
    if choices is None or choices <= experts:
        return None
    return Unmasked(masked_ids.source, masked_scales.source, choices)


def handed_on(value: object, x: fx.Node, pairs: tuple[int, int], given: Unmasked, experts: int) -> bool:
    """Whether ``value`` is ``x · Σ_k [id >= experts] w`` for the tokens ``x``, ids and weights ``given`` of ``pairs``
    [T, K]."""
    if not is_call(value, aten.mul.Tensor):
        return False
    node = cast(fx.Node, value)
    for token, share in (node.args[:2], node.args[1::-1]):
        if not isinstance(token, fx.Node) or not isinstance(share, fx.Node):
            continue
        rows = shape(token)[:-1]
        by_token = math.prod(rows) == pairs[0] and shape(share) == (*rows, 1)
        if by_token and _unrounded(token) is _unrounded(x) and _is_share(_unrounded(share), pairs, given, experts):
            return True
    return False


def _unrounded(node: fx.Node) -> fx.Node:
    """What ``node`` was before reshapes and casts to a floating dtype."""
    while is_call(node, aten.reshape.default) or (
            is_call(node, aten._to_copy.default) and dtype(node).is_floating_point):
        node = cast(fx.Node, node.args[0])
    return node


def _is_share(total: fx.Node, pairs: tuple[int, int], given: Unmasked, experts: int) -> bool:
    """Whether ``total`` is ``Σ_k [id >= experts] w`` of the weights ``given``."""
    if not is_call(total, aten.sum.dim_IntList) or list(cast("list[int]", total.args[1])) not in ([1], [-1]):
        return False
    summed = cast(fx.Node, total.args[0])
    weights = masked(summed) if shape(summed) == pairs else None
    if weights is None or weights.kept != Split(whole_ids(given.ids), experts, False):
        return False
    return before(weights.source, aten.reshape.default) is before(given.scales, aten.reshape.default)


def masked(node: fx.Node) -> Masked | None:
    """What a tensor with zeros at some experts was before, and where it was kept."""
    node = before(node, aten.reshape.default)
    if is_call(node, aten.masked_fill.Scalar) and node.args[2] == 0:
        return _kept(node.args[0], node.args[1], False, node)
    if is_call(node, aten.where.self):
        condition, kept, other = node.args
        if constant(other) == 0:
            return _kept(kept, condition, True, node)
        if constant(kept) == 0:
            return _kept(other, condition, False, node)
    return None


def _kept(source: object, condition: object, where: bool, node: fx.Node) -> Masked | None:
    split = _split(condition)
    if split is None or not isinstance(source, fx.Node):
        return None
    if not shape(source) == shape(node) == shape(cast(fx.Node, condition)) or dtype(source) != dtype(node):
        return None
    return Masked(source, Split(split.ids, split.bound, split.below == where))


def _split(condition: object) -> Split | None:
    flips = 0
    while is_call(condition, *NOTS, aten.reshape.default):
        node = cast(fx.Node, condition)
        flips += is_call(node, *NOTS)
        condition = node.args[0]
    if not isinstance(condition, fx.Node) or len(condition.args) < 2 or type(condition.args[1]) is not int:
        return None
    bound = condition.args[1]
    forms = {aten.lt.Scalar: (bound, True), aten.ge.Scalar: (bound, False),
             aten.le.Scalar: (bound + 1, True), aten.gt.Scalar: (bound + 1, False)}
    ids = cast(fx.Node, condition.args[0])
    if condition.target not in forms or dtype(ids) not in INTEGERS:
        return None
    edge, below = forms[condition.target]
    return Split(whole_ids(ids), edge, below != bool(flips % 2))


def number_of_choices(ids: fx.Node) -> int | None:
    """How many experts the router that gave ``ids`` chooses from; None when that is not known."""
    if is_call(ids, operator.getitem) and ids.args[1] == 1:
        routed = cast(fx.Node, ids.args[0])
        target = routed.target
        if isinstance(target, torch._ops.OpOverload) and target.name() == "npu::npu_moe_gating_top_k":
            return shape(cast(fx.Node, routed.args[0]))[1]
    top = largest(ids)
    return None if top is None else top + 1
