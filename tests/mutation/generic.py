"""Mutations that fit any node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import ALL, Edit, NotHereError, Operator, calls, floating

BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor)


def floats(p: Program) -> list[fx.Node]:
    """Floating intermediates with defined values."""
    skipped = (aten.copy_.default, aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
    return [n for n in p.gm.graph.nodes if n.op == "call_function" and floating(n) and not is_call(n, *skipped)]


def values(p: Program) -> list[fx.Node]:
    """All intermediates that are one tensor with defined values."""
    skipped = (aten.copy_.default, aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
    return [n for n in p.gm.graph.nodes
            if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor) and not is_call(n, *skipped)]


def binaries(p: Program) -> list[fx.Node]:
    """Calls with two floating tensors."""
    return [n for n in calls(p, *BINARY) if floating(n) and all(
        isinstance(a, fx.Node) and floating(a) for a in n.args[:2])]


def commutative(p: Program) -> list[fx.Node]:
    """Sums and products of two tensors."""
    return [n for n in binaries(p) if is_call(n, aten.add.Tensor, aten.mul.Tensor)]


def weights(p: Program) -> list[fx.Node]:
    """Floating parameters that something reads."""
    names = {s.name for s in p.inputs if s.kind in ("parameter", "buffer")}
    return [n for n in p.gm.graph.nodes if n.op == "placeholder" and n.name in names and floating(n) and n.users]


def linears(p: Program) -> list[fx.Node]:
    """Linears and matrix products."""
    return calls(p, aten.linear.default)


def _returned(e: Edit, n: fx.Node) -> None:
    e.returned(n)


def _extra_reader(e: Edit, n: fx.Node) -> None:
    if not floating(n):
        raise NotHereError
    e.returned(e.after(n, aten.mul.Tensor, 2.0, users=[]))


def _scaled(e: Edit, n: fx.Node) -> None:
    e.after(n, aten.mul.Tensor, e.factor())


def _negated(e: Edit, n: fx.Node) -> None:
    e.after(n, aten.neg.default)


def _plus(e: Edit, n: fx.Node) -> None:
    e.after(n, aten.add.Tensor, e.typical(n))


def _wrap(target: Any, *args: Any, **kwargs: Any) -> Any:
    def apply(e: Edit, n: fx.Node) -> None:
        e.after(n, target, *args, **kwargs)

    return apply


def _negative_zero(e: Edit, n: fx.Node) -> None:
    """Adding -0.0 keeps every value, -0.0 included."""
    e.after(n, aten.add.Tensor, -0.0)


def _nan_to_num(e: Edit, n: fx.Node) -> None:
    value = e.nodes.get(n.name)
    if not isinstance(value, torch.Tensor) or not torch.isfinite(value).all():
        raise NotHereError
    e.after(n, aten.nan_to_num.default)


def _wide_clamp(e: Edit, n: fx.Node) -> None:
    value = e.nodes.get(n.name)
    if not isinstance(value, torch.Tensor) or not torch.isfinite(value).all():
        raise NotHereError
    e.after(n, aten.clamp.default, -1e30 if dtype(n) != torch.float16 else -6e4, 1e30)


def _tight_clamp(e: Edit, n: fx.Node) -> None:
    limit = e.typical(n)
    e.after(n, aten.clamp.default, -limit, limit)


def _dropout(e: Edit, n: fx.Node) -> None:
    e.after(n, aten.dropout.default, 0.0, False)


def _cast_and_back(e: Edit, n: fx.Node) -> None:
    """Up and back again."""
    narrow = dtype(n)
    wide = torch.float32 if narrow != torch.float32 else torch.float64
    up = e.after(n, aten._to_copy.default, dtype=wide)
    e.after(up, aten._to_copy.default, dtype=narrow)


def _rounded(to: torch.dtype) -> Any:
    def apply(e: Edit, n: fx.Node) -> None:
        if dtype(n) == to:
            raise NotHereError
        value = e.nodes.get(n.name)
        if to == torch.float16 and not (isinstance(value, torch.Tensor) and float(value.abs().max()) < 6e4):
            raise NotHereError
        before = dtype(n)
        narrow = e.after(n, aten._to_copy.default, dtype=to)
        e.after(narrow, aten._to_copy.default, dtype=before)

    return apply


def _other_dtype(to: torch.dtype) -> Any:
    """The value stays in the other dtype as far as promotion carries it."""
    def apply(e: Edit, n: fx.Node) -> None:
        if dtype(n) == to:
            raise NotHereError
        e.after(n, aten._to_copy.default, dtype=to)

    return apply


def _reshaped_and_back(e: Edit, n: fx.Node) -> None:
    size = list(shape(n))
    if not size:
        raise NotHereError
    flat = e.after(n, aten.reshape.default, [-1])
    e.after(flat, aten.reshape.default, size)


def _transposed_twice(e: Edit, n: fx.Node) -> None:
    rank = len(shape(n))
    if rank < 2:
        raise NotHereError
    order = [*range(rank - 2), rank - 1, rank - 2]
    once = e.after(n, aten.permute.default, order)
    e.after(once, aten.permute.default, order)


def _swapped(e: Edit, n: fx.Node) -> None:
    e.become(n, n.target, n.args[1], n.args[0])


def _operands_exchanged(e: Edit, n: fx.Node) -> None:
    """a - b becomes b - a."""
    if is_call(n, aten.add.Tensor, aten.mul.Tensor):
        raise NotHereError
    e.become(n, n.target, n.args[1], n.args[0])


def _other_operation(e: Edit, n: fx.Node) -> None:
    choices = [t for t in (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor) if not is_call(n, t)]
    e.become(n, e.rng.choice(choices), *n.args)


def _broadcast_operand(e: Edit, n: fx.Node) -> None:
    """One row (or column) of an operand for all."""
    options = [(a, d) for a in n.args[:2] if isinstance(a, fx.Node) for d in range(len(shape(a))) if shape(a)[d] > 1]
    if not options:
        raise NotHereError
    node, dim = e.rng.choice(options)
    e.swap_input(n, node, e.before(n, aten.slice.Tensor, node, dim, 0, 1))
    size = shape(n)
    e.editor.refresh(n)
    if shape(n) != size:
        raise NotHereError


def _expanded_operand(e: Edit, n: fx.Node) -> None:
    """One row for all, expanded: the shape looks right."""
    options = [(a, d) for a in n.args[:2] if isinstance(a, fx.Node) for d in range(len(shape(a))) if shape(a)[d] > 1]
    if not options:
        raise NotHereError
    node, dim = e.rng.choice(options)
    one = e.before(n, aten.slice.Tensor, node, dim, 0, 1)
    e.swap_input(n, node, e.before(n, aten.expand.default, one, list(shape(node))))


def _reversed(e: Edit, n: fx.Node) -> None:
    size = shape(n)
    dims = [d for d in range(len(size)) if size[d] > 1]
    if not dims:
        raise NotHereError
    e.after(n, aten.flip.default, [e.rng.choice(dims)])


def _rolled(e: Edit, n: fx.Node) -> None:
    """Off by one along a dim."""
    size = shape(n)
    dims = [d for d in range(len(size)) if size[d] > 1]
    if not dims:
        raise NotHereError
    e.after(n, aten.roll.default, [1], [e.rng.choice(dims)])


def _duplicated(e: Edit, n: fx.Node) -> None:
    """Computed twice; one reader takes the second."""
    readers = [u for u in n.users if u.op == "call_function"]
    if not readers:
        raise NotHereError
    twin = e.behind(n, n.target, *n.args, **n.kwargs)
    reader = e.rng.choice(readers)
    if not (is_call(reader, aten.copy_.default)):
        e.swap_input(reader, n, twin)


def _constant(e: Edit, n: fx.Node) -> None:
    """A constant instead of a computed value."""
    value = e.nodes.get(n.name)
    if not isinstance(value, torch.Tensor) or not torch.isfinite(value).all():
        raise NotHereError
    full = e.behind(n, aten.full.default, list(shape(n)), e.typical(n), dtype=dtype(n))
    for reader in list(n.users):
        e.swap_input(reader, n, full)


def _replaced_by_argument(e: Edit, n: fx.Node) -> None:
    """A value from outside instead of a computed one."""
    value = e.nodes.get(n.name)
    if not isinstance(value, torch.Tensor) or not torch.isfinite(value).all():
        raise NotHereError
    new = e.argument(e.noise(*shape(n), scale=e.typical(n), dtype=dtype(n)))
    e.bypass(n, new)


def _input_of_first_token(e: Edit, n: fx.Node) -> None:
    x: Any = n.args[0]
    dims = [d for d in range(len(shape(x)) - 1) if shape(x)[d] > 1]
    if not dims:
        raise NotHereError
    one = e.before(n, aten.slice.Tensor, x, dims[-1], 0, 1)
    e.swap_input(n, x, e.before(n, aten.expand.default, one, list(shape(x))))


def _dead(e: Edit, n: fx.Node) -> None:
    """A subexpression that nothing reads."""
    e.after(n, aten.exp.default, users=[])


def _reads_other(e: Edit, n: fx.Node) -> None:
    """An operand is replaced by another earlier value of the same shape and dtype."""
    nodes = list(n.graph.nodes)
    earlier = nodes[: nodes.index(n)]
    operands = [a for a in n.all_input_nodes if floating(a)]
    if not operands:
        raise NotHereError
    old = e.rng.choice(operands)
    like = [m for m in earlier if m not in n.all_input_nodes and m.op == "call_function" and floating(m)
            and not is_call(m, aten.empty_like.default) and shape(m) == shape(old) and dtype(m) == dtype(old)]
    if not like:
        raise NotHereError
    new = e.rng.choice(like)
    e.swap_input(n, old, new)
    e.read |= {m.name for m in _lineage(new)}
    e.instead |= {m.name for m in _lineage(old)}
    e.lines |= {str(m.meta.get("source")) for m in _lineage(new)}


def _lineage(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it is a function of: a reason looks through operations of one operand."""
    found = [node]
    while len(found[-1].all_input_nodes) == 1:
        found.append(found[-1].all_input_nodes[0])
    return found


KEEP = {"legal": True, "same": True}
OPERATORS = (
    Operator("any_returned", ALL, values, _returned, legal=True, same=True),
    Operator("any_read_elsewhere", ALL, floats, _extra_reader, legal=True, same=True),
    Operator("any_scaled", ALL, floats, _scaled),
    Operator("any_negated", ALL, floats, _negated),
    Operator("any_constant_added", ALL, floats, _plus),
    Operator("any_cloned", ALL, values, _wrap(aten.clone.default), **KEEP),
    Operator("any_detached", ALL, floats, _wrap(aten.detach.default), **KEEP),
    Operator("any_aliased", ALL, values, _wrap(aten.alias.default), **KEEP),
    Operator("any_times_one", ALL, floats, _wrap(aten.mul.Tensor, 1.0), **KEEP),
    Operator("any_minus_zero_added", ALL, floats, _negative_zero, **KEEP),
    Operator("any_zero_added", ALL, floats, _wrap(aten.add.Tensor, 0.0), same=True),
    Operator("any_nan_to_num", ALL, floats, _nan_to_num, same=True),
    Operator("any_wide_clamp", ALL, floats, _wide_clamp, same=True),
    Operator("any_tight_clamp", ALL, floats, _tight_clamp),
    Operator("any_dropout_zero", ALL, floats, _dropout, **KEEP),
    Operator("any_cast_up_and_back", ALL, floats, _cast_and_back, **KEEP),
    Operator("any_rounded_to_bf16", ALL, floats, _rounded(torch.bfloat16), same=True),
    Operator("any_rounded_to_fp16", ALL, floats, _rounded(torch.float16), same=True),
    Operator("any_kept_in_fp32", ALL, floats, _other_dtype(torch.float32), same=True),
    Operator("any_kept_in_bf16", ALL, floats, _other_dtype(torch.bfloat16), words=("expected float32 inside",),
             same=True),
    Operator("any_reshaped_and_back", ALL, values, _reshaped_and_back, **KEEP),
    Operator("any_transposed_twice", ALL, values, _transposed_twice, **KEEP),
    Operator("operands_swapped", ALL, commutative, _swapped, **KEEP),
    Operator("operands_exchanged", ALL, binaries, _operands_exchanged),
    Operator("other_operation", ALL, binaries, _other_operation),
    Operator("operand_broadcast", ALL, binaries, _broadcast_operand),
    Operator("operand_of_first_row", ALL, binaries, _expanded_operand),
    Operator("any_reversed", ALL, floats, _reversed),
    Operator("any_off_by_one", ALL, floats, _rolled),
    Operator("any_computed_twice", ALL, values, _duplicated, **KEEP),
    Operator("any_constant", ALL, floats, _constant),
    Operator("any_from_outside", ALL, floats, _replaced_by_argument),
    Operator("any_operand_replaced", ALL, floats, _reads_other),
    Operator("dead_subexpression", ALL, floats, _dead, **KEEP),
    Operator("linear_of_first_token", ALL, linears, _input_of_first_token, words=("expand",)),
)
