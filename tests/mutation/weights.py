"""Mutations that fit any weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from tests.mutation.generic import linears, weights
from tests.mutation.operators import ALL, Edit, NotHereError, Operator, retype


def _weight_as_constant(e: Edit, n: fx.Node) -> None:
    if len(shape(n)) != 1:
        raise NotHereError
    first = next(x for x in n.graph.nodes if x.op == "call_function")
    e.bypass(n, e.before(first, aten.full.default, list(shape(n)), 0.7, dtype=dtype(n)))


def _weight_as_argument(e: Edit, n: fx.Node) -> None:
    scale = e.typical(n)
    e.bypass(n, e.argument(e.noise(*shape(n), scale=scale, dtype=dtype(n))))


def _weight_dtype(to: torch.dtype) -> Any:
    def apply(e: Edit, n: fx.Node) -> None:
        if dtype(n) == to:
            raise NotHereError
        retype(e, n, to)

    return apply


def _weight_cast(e: Edit, n: fx.Node) -> None:
    """Stored in fp32, cast to the model's dtype at each step."""
    narrow = dtype(n)
    if narrow == torch.float32:
        raise NotHereError
    retype(e, n, torch.float32)
    first = next(x for x in n.graph.nodes if x.op == "call_function")
    cast = e.before(first, aten._to_copy.default, n, dtype=narrow)
    for reader in list(n.users):
        if reader is not cast:
            e.swap_input(reader, n, cast)


def _weight_elsewhere(e: Edit, n: fx.Node) -> None:
    """Two roles for one weight: another one of the same shape is replaced by it."""
    same = [w for w in weights(e.program) if w is not n and shape(w) == shape(n) and dtype(w) == dtype(n)]
    inputs = {u.args[0] for u in n.users if is_call(u, aten.linear.default)}
    same = [w for w in same if not any(u.args[0] in inputs for u in w.users)]  # two equal linears are one
    if not same:
        raise NotHereError
    e.bypass(e.rng.choice(same), n)


def _weight_transposed(e: Edit, n: fx.Node) -> None:
    """A square weight is used the other way round."""
    if len(shape(n)) < 2 or shape(n)[-1] != shape(n)[-2]:
        raise NotHereError
    rank = len(shape(n))
    first = next(x for x in n.graph.nodes if x.op == "call_function")
    turned = e.before(first, aten.permute.default, n, [*range(rank - 2), rank - 1, rank - 2])
    for reader in list(n.users):
        if reader is not turned:
            e.swap_input(reader, n, turned)


def _stored_transposed(e: Edit, n: fx.Node) -> None:
    """The parameter is stored [in, out] and transposed at each step: the same function."""
    if len(shape(n)) != 2 or not all(is_call(u, aten.linear.default) and u.args[1] is n for u in n.users):
        raise NotHereError
    from dataclasses import replace

    value = e.values[n.name].t().contiguous()
    e.values[n.name] = value
    with e.editor.fake_mode:
        n.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
    specs = e.program.inputs
    i = next(i for i, s in enumerate(specs) if s.name == n.name)
    specs[i] = replace(specs[i], shape=tuple(value.shape), stride=value.stride())
    readers = list(n.users)
    first = next(x for x in n.graph.nodes if x.op == "call_function")
    turned = e.before(first, aten.permute.default, n, [1, 0])
    for reader in readers:
        e.swap_input(reader, n, turned)


def _bias(e: Edit, n: fx.Node) -> None:
    if len(n.args) > 2:
        raise NotHereError
    e.become(n, aten.linear.default, *n.args, e.argument(e.noise(shape(n)[-1], dtype=dtype(n))))


OPERATORS = (
    Operator("weight_constant", ALL, weights, _weight_as_constant),
    Operator("weight_from_outside", ALL, weights, _weight_as_argument),
    Operator("weight_fp32", ALL, weights, _weight_dtype(torch.float32), same=True),
    Operator("weight_fp16", ALL, weights, _weight_dtype(torch.float16), same=True),
    Operator("weight_cast_each_step", ALL, weights, _weight_cast, same=True),
    Operator("weight_in_two_roles", ALL, weights, _weight_elsewhere, legal=True),
    Operator("weight_transposed", ALL, weights, _weight_transposed),
    Operator("weight_stored_transposed", ALL, weights, _stored_transposed, legal=True, same=True),
    Operator("linear_bias", ALL, linears, _bias),
)
