"""Writes of whole rows: ``npu_scatter_nd_update`` where its dtypes allow, ``aten.scatter`` otherwise.

An input of the graph is rebound to its rows, so that the scatter updates it in place without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.writes import nonnegative
from cannopy.fx_passes.program import Program

SCATTER_ND_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)
"""op-plugin document of npu_scatter_nd_update."""


def scatter_nd() -> Any:
    """The functional scatter of torch_npu; AttributeError with the cure when torch_npu is not imported."""
    try:
        return torch.ops.npu.npu_scatter_nd_update.default
    except AttributeError as e:
        raise AttributeError("torch.ops.npu.npu_scatter_nd_update does not exist: import torch_npu first") from e


def write(program: Program, editor: Editor, node: fx.Node, slots: fx.Node, updates: fx.Node, rows: int) -> None:
    """Give ``node`` the value of its first argument, seen as ``[rows, D]``, with row ``slots[t]`` = ``updates[t]``.

    ``slots`` is int64 ``[T]`` within 0 … rows - 1, each at most once; ``updates`` is ``[T, D]``. Both stand before
    ``node``, and new nodes go there.
    """
    base = cast(fx.Node, node.args[0])
    width = shape(updates)[1]
    cache = _input_behind(base) if dtype(node) in SCATTER_ND_TYPES else None
    if cache is not None and rebind.why_not(program, cache, (rows, width)) is None:
        rebind.rebind(program, editor, cache, (rows, width))
    rank = _row_rank(shape(cache), rows, width) if cache is not None else None
    if cache is None or rank is None:
        # Rebinding may have given the node another operand, so look again.
        seen = editor.reshape(cast(fx.Node, node.args[0]), [rows, width])
        editor.replace(node, editor.reshape(table(editor, seen, slots, updates), shape(node)))
        return
    new = _into_input(editor, cache, slots, updates, rank)
    if _feeds_copy(cache, node):
        rebind.update(editor, cache, node, new)
    else:
        editor.replace(node, editor.reshape(new, shape(node)))


def table(editor: Editor, rows: fx.Node, slots: fx.Node, updates: fx.Node, add: bool = False) -> fx.Node:
    """``rows`` ``[R, D]`` with row ``slots[t]`` replaced by ``updates[t]``, or with that added to it."""
    index = editor.reshape(slots, [shape(slots)[0], 1])
    if dtype(rows) in SCATTER_ND_TYPES and not add:
        return editor.call(scatter_nd(), rows, index, updates)
    operation = aten.scatter_add.default if add else aten.scatter.src
    return editor.call(operation, rows, 0, editor.expand(index, shape(updates)), updates)


def _into_input(editor: Editor, cache: fx.Node, slots: fx.Node, updates: fx.Node, rank: int) -> fx.Node:
    """The scatter whose operand is the input itself, in rows or in blocks ``[blk, bs, .., D]`` (``rank`` row dims)."""
    size = shape(cache)
    columns = []
    for d in range(rank):
        inner = math.prod(size[d + 1 : rank])
        part = slots if inner == 1 else editor.call(aten.floor_divide.default, slots, inner)
        part = part if d == 0 else editor.call(aten.remainder.Scalar, part, size[d])
        columns.append(editor.reshape(part, [shape(slots)[0], 1]))
    index = columns[0] if rank == 1 else editor.call(aten.cat.default, columns, 1)
    return editor.call(scatter_nd(), cache, index, editor.reshape(updates, [shape(slots)[0], *size[rank:]]))


def _row_rank(size: tuple[int, ...], rows: int, width: int) -> int | None:
    """How many leading dims of ``size`` number the rows; None when rows of that width are no sub-block of it."""
    for rank in range(1, len(size) + 1):
        if math.prod(size[:rank]) == rows and math.prod(size[rank:]) == width:
            return rank
    return None


def _input_behind(base: fx.Node) -> fx.Node | None:
    while is_call(base, aten.reshape.default):
        base = cast(fx.Node, base.args[0])
    return base if base.op == "placeholder" and rebind.write_of(base) is not None else None


def _feeds_copy(cache: fx.Node, node: fx.Node) -> bool:
    written = rebind.write_of(cache)
    value = written.args[1] if written is not None else None
    while is_call(value, aten.reshape.default):
        value = cast(fx.Node, value).args[0]
    return value is node


def flat(editor: Editor, indices: Sequence[fx.Node], sizes: Sequence[int]) -> fx.Node:
    """Row numbers ``[T]`` of equally shaped indices into leading dims of ``sizes``."""
    total = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        total = editor.call(aten.add.Tensor, editor.call(aten.mul.Tensor, total, size), index)
    return editor.reshape(total, [math.prod(shape(total))])


def from_start(program: Program, editor: Editor, index: fx.Node, size: int) -> fx.Node:
    """``index`` as int64 with positions counted from the end (negative ones) counted from the start."""
    wide = index if dtype(index) == torch.int64 else editor.call(aten._to_copy.default, index, dtype=torch.int64)
    if nonnegative(program, index):
        return wide
    from_end = editor.call(aten.add.Tensor, wide, size)
    return editor.call(aten.where.self, editor.call(aten.lt.Scalar, wide, 0), from_end, wide)
