"""Changes of numbers at every named place and at any node: factors that are no factors, integers, narrow floats,
rounding, ranges and constant masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation import places as of
from tests.mutation.generic import floats
from tests.mutation.operators import (
    ALL,
    ATTENTION,
    EXPERTS,
    MLP,
    NORM,
    ROPE,
    ROUTER,
    Edit,
    NotHereError,
    Operator,
)
from tests.mutation.places import Place

Tensor = torch.Tensor
Change = Callable[[Edit, fx.Node], list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]
"""The calls that are put behind a value, each of the one before: (target, further arguments, keywords)."""


def _apply(change: Change) -> Callable[[Edit, Place], None]:
    def apply(e: Edit, place: Place) -> None:
        node = place.node
        readers = [u for u in place.readers if not is_call(u, aten.copy_.default) or u.args[0] is not node]
        if not readers:
            raise NotHereError
        last = node
        before = readers[0] if node.op == "placeholder" else None
        for target, args, kwargs in change(e, node):
            if before is not None:
                last = e.before(before, target, last, *args, **kwargs)
            else:
                last = e.behind(last, target, last, *args, **kwargs)
        for reader in readers:
            reader.replace_input_with(node, last)

    return apply


def _number(e: Edit, node: fx.Node) -> Tensor:
    value = e.nodes.get(node.name)
    if not isinstance(value, Tensor) or not value.numel():
        raise NotHereError
    return value


ZERO = ((aten.mul.Tensor, 0.0), (aten.mul.Tensor, -0.0), (aten.div.Tensor, math.inf))
INFINITE = ((aten.mul.Tensor, math.inf), (aten.mul.Tensor, -math.inf), (aten.div.Tensor, 0.0), (aten.div.Tensor, -0.0))


def _no_factor(e: Edit, node: fx.Node) -> list[Any]:
    """Times 0, times infinity, over 0: 0, infinite or NaN whatever the value is. Picks among infinite scores mean
    nothing, so that graphs with a top-k get zeros."""
    chooses = any(is_call(n, aten.topk.default) for n in node.graph.nodes)
    target, number = e.rng.choice(ZERO if chooses else (*ZERO, *INFINITE))
    return [(target, (number,), {})]


def _through_integers(e: Edit, node: fx.Node) -> list[Any]:
    value, back = _number(e, node), dtype(node)
    largest = float(value.abs().max())
    kinds = [torch.bool, *(k for k in (torch.int8, torch.int16, torch.int32, torch.int64)
                           if largest < torch.iinfo(k).max)]
    copy = aten._to_copy.default
    calls = [(copy, (), {"dtype": e.rng.choice(kinds)}), (copy, (), {"dtype": back})]
    if e.rng.random() < 0.3 and back != torch.float32:  # up again in two steps
        calls.insert(1, (copy, (), {"dtype": torch.float32}))
    return calls


def _stays_integer(e: Edit, node: fx.Node) -> list[Any]:
    """The readers take integers: promotion makes them floats again, in another dtype."""
    if float(_number(e, node).abs().max()) > 2 ** 31:
        raise NotHereError
    return [(aten._to_copy.default, (), {"dtype": e.rng.choice([torch.int32, torch.int64, torch.bool])})]


def _narrow(e: Edit, node: fx.Node) -> list[Any]:
    largest, back = float(_number(e, node).abs().max()), dtype(node)
    kinds = [k for k in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
             if k != back and largest < torch.finfo(k).max]
    if not kinds:
        raise NotHereError
    copy = aten._to_copy.default
    return [(copy, (), {"dtype": e.rng.choice(kinds)}), (copy, (), {"dtype": back})]


def _rounded(e: Edit, node: fx.Node) -> list[Any]:
    targets = (aten.trunc.default, aten.round.default, aten.floor.default, aten.ceil.default, aten.sign.default)
    return [(e.rng.choice(targets), (), {})]


def _in_range(e: Edit, node: fx.Node) -> list[Any]:
    """A range that cuts some of the values."""
    value = _number(e, node)
    value = value[torch.isfinite(value)].double()
    if value.numel() < 4:
        raise NotHereError
    low, high = (float(value.quantile(q)) for q in (e.rng.uniform(0.05, 0.4), e.rng.uniform(0.6, 0.95)))
    if low == high or max(abs(low), abs(high)) > 1e30:
        raise NotHereError
    return [e.rng.choice([
        (aten.clamp.default, (low, high), {}), (aten.clamp_min.default, (low,), {}),
        (aten.clamp_max.default, (high,), {}), (aten.hardtanh.default, (low, high), {})])]


def _mask(e: Edit, node: fx.Node, shown: bool) -> list[Any]:
    """Some entries of the last dim become 0 (or none do) by a mask that is a constant of the graph."""
    size = shape(node)
    if not size or size[-1] < 2:
        raise NotHereError
    first = next(n for n in node.graph.nodes if n.op == "call_function")
    if shown:
        hidden = e.before(first, aten.full.default, [size[-1]], False, dtype=torch.bool)
    else:
        columns = e.before(first, aten.arange.default, size[-1])
        hidden = e.before(columns.next, aten.lt.Scalar, columns, e.rng.randint(1, size[-1] - 1))
    return [(aten.masked_fill.Scalar, (hidden, 0.0), {})]


def _masked(e: Edit, node: fx.Node) -> list[Any]:
    return _mask(e, node, shown=False)


def _mask_of_none(e: Edit, node: fx.Node) -> list[Any]:
    return _mask(e, node, shown=True)


def _finite(e: Edit, node: fx.Node) -> list[Any]:
    """NaN and infinities replaced, of which there are none."""
    if not torch.isfinite(_number(e, node)).all():
        raise NotHereError
    return [(aten.nan_to_num.default, (), {})]


def _apart(e: Edit, node: fx.Node) -> list[Any]:
    return [(target, (), {}) for target in e.rng.sample([aten.clone.default, aten.detach.default,
                                                         aten.alias.default], 2)]


CHANGES: tuple[tuple[str, Change, tuple[str, ...], bool], ...] = (
    ("times_zero_or_infinity", _no_factor, ("is 0.0", "is -0.0", "is inf", "is -inf"), False),
    ("through_integers", _through_integers, (), False),
    ("as_integers", _stays_integer, ("int32", "int64", "bool"), False),
    ("through_narrow_floats", _narrow, ("float8", "float16"), True),
    ("rounded_to_integers", _rounded, (), False),
    ("cut_to_range", _in_range, (), False),
    ("masked_by_constant", _masked, (), False),
    ("masked_nowhere", _mask_of_none, (), True),
    ("made_finite", _finite, (), True),
)
"""(name, change, words that name it, whether the function stays)."""
PLACES: tuple[tuple[str, tuple[str, ...], Callable[[Program], list[Place]], bool], ...] = (
    ("norm", NORM, of.norm_places, False),
    ("residual", NORM, of.residual_places, False),
    ("residual_term", NORM, of.branch_places, True),
    ("rope", ROPE, of.rope_places, False),
    ("router", ROUTER, of.router_places, False),
    ("router_logits", ROUTER, of.logit_places, True),
    ("experts", EXPERTS, of.expert_places, False),
    ("glu", (*MLP, *EXPERTS), of.glu_places, False),
    ("attention", ATTENTION, of.attention_places, False),
    ("indexer", ATTENTION, of.indexer_places, False),
    ("cache", ATTENTION, of.cache_places, False),
)
"""(name, rules, places, whether the place is in front of the pattern, so that every fusion remains)."""


def _all(p: Program) -> list[Place]:
    """All nodes but the counts of rows per expert: other counts reach behind the rows, which has no meaning."""
    return [Place("node", n, tuple(n.users)) for n in floats(p) if not is_call(n, aten.histc.default)]


def _operators() -> Sequence[Operator]:
    found = []
    for where, rules, sites, legal in PLACES:
        for name, change, words, same in CHANGES:
            kept = legal and name != "as_integers"
            found.append(Operator(f"{where}_{name}", rules, sites, _apply(change), kept, words, same))
    found += [Operator(f"any_{name}", ALL, _all, _apply(change), False, words, same)
              for name, change, words, same in CHANGES]
    found += [Operator(f"{where}_copied", rules, sites, _apply(_apart), True, (), True)
              for where, rules, sites, _ in PLACES]
    return found


OPERATORS = _operators()
