"""index_put and slice_scatter that write positions along one dim of a mutated input  →  ``aten.index_copy``."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.constants import constant
from cannopy.fx_passes.normalise.slices import scatter_bounds
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

NONNEGATIVE = "nonnegative"
"""Key of `Program.facts`: names of integer inputs that are never negative."""

INTEGERS = (torch.int64, torch.int32)


def run(program: Program) -> int:
    """Give cache writes one spelling."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if is_call(node, aten.index_put.default):
        return _index_put(program, editor, node)
    return _slice_scatter(editor, node)


WRITES = frozenset({aten.index_put.default, aten.slice_scatter.default})
STEP = Step("writes", WRITES, _visit, far=WRITES)
"""Whether the value is written back depends on its users, whether an index can be negative on all behind it."""


def _written_back(node: fx.Node, base: Any) -> bool:
    """Whether ``base`` is an input and ``node`` its next value."""
    return isinstance(base, fx.Node) and base.op == "placeholder" and any(
        is_call(user, aten.copy_.default) and user.args[0] is base for user in node.users
    )


def _slice_scatter(editor: Editor, node: fx.Node) -> int:
    base, value = node.args[0], node.args[1]
    if not _written_back(node, base):
        return 0
    dim, start, end, step = scatter_bounds(node)
    with editor.before(node):
        index = editor.call(aten.arange.start_step, start, end, step, dtype=torch.int64,
                            device=node.meta["val"].device)
        editor.replace(node, editor.call(aten.index_copy.default, base, dim, index, value))
    return 1


def _index_put(program: Program, editor: Editor, node: fx.Node) -> int:
    base, indices, value = cast("tuple[fx.Node, list[fx.Node | None], fx.Node]", node.args[:3])
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if accumulate or not _written_back(node, base) or len(given) != 1:
        return 0
    dim, index = given[0]
    if dtype(index) not in INTEGERS or len(shape(index)) > 1:
        return 0
    size = shape(node)
    with editor.before(node):
        whole = editor.expand(value, (*size[:dim], *shape(index), *size[dim + 1 :]))
        rows = editor.reshape(index, [index.meta["val"].numel()])
        if dtype(rows) != torch.int64:
            rows = editor.call(aten._to_copy.default, rows, dtype=torch.int64)
        if not nonnegative(program, index):
            # index_put counts a negative position from the end, index_copy refuses it.
            from_end = editor.call(aten.add.Tensor, rows, size[dim])
            rows = editor.call(aten.where.self, editor.call(aten.lt.Scalar, rows, 0), from_end, rows)
        whole = editor.reshape(whole, (*size[:dim], shape(rows)[0], *size[dim + 1 :]))
        editor.replace(node, editor.call(aten.index_copy.default, base, dim, rows, whole))
    return 1


def nonnegative(program: Program, value: Any) -> bool:
    """Whether the integers of ``value`` are known to be 0 or more."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int) and value >= 0
    if value.op == "placeholder":
        return value.name in program.facts.get(NONNEGATIVE, ())
    if is_call(value, aten.arange.default):
        return True
    if is_call(value, aten.arange.start, aten.arange.start_step):
        step = value.args[2] if len(value.args) > 2 else 1
        return nonnegative(program, value.args[0]) and nonnegative(program, step)
    if is_call(value, operator.getitem):
        return bool(value.args[1] == 1) and is_call(value.args[0], aten.topk.default, aten.sort.default)
    if is_call(value, aten.remainder.Scalar):
        return nonnegative(program, value.args[1])
    if is_call(value, aten.clamp.default):
        return len(value.args) > 1 and nonnegative(program, value.args[1])
    if is_call(value, aten.add.Tensor, aten.mul.Tensor) and not value.kwargs:
        return all(nonnegative(program, a) for a in value.args)
    if is_call(value, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.permute.default):
        return nonnegative(program, value.args[0])
    if is_call(value, aten._to_copy.default):
        source = value.args[0]
        return isinstance(source, fx.Node) and dtype(source) in INTEGERS and dtype(value) == torch.int64 and (
            nonnegative(program, source)
        )
    number = constant(value)
    return number is not None and bool(number >= 0)
