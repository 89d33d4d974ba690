"""split, split_with_sizes, chunk, narrow + getitem  →  ``aten.slice(x, dim, start, end, step)`` with explicit bounds;
slice_scatter into fresh memory that covers a whole dim  →  ``aten.cat``; concatenation dims become non-negative."""

from __future__ import annotations

import operator
from typing import cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.program import Program

SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes, aten.chunk.default)
EMPTY = (aten.new_empty.default, aten.empty.memory_format, aten.new_zeros.default, aten.zeros.default, aten.full.default)


def run(program: Program) -> int:
    """Rewrite every way of taking or joining parts of a tensor along one dim."""
    editor = Editor(program.gm)
    changes = 0
    for node in list(editor.graph.nodes):
        if is_call(node, operator.getitem) and is_call(node.args[0], *SPLITS):
            changes += _part(editor, node)
        elif is_call(node, aten.slice.Tensor):
            changes += _explicit(editor, node)
        elif is_call(node, aten.slice_scatter.default):
            changes += _joined(editor, node)
        elif is_call(node, aten.cat.default):
            changes += _cat(node)
    editor.sweep()
    return changes


def _part(editor: Editor, node: fx.Node) -> int:
    split = cast(fx.Node, node.args[0])
    index = cast(int, node.args[1])
    source = cast(fx.Node, split.args[0])
    parts = split.meta["val"]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    dim = cast(int, dim) % len(shape(source))
    start = sum(int(p.shape[dim]) for p in parts[:index])
    with editor.before(node):
        editor.replace(node, editor.call(aten.slice.Tensor, source, dim, start, start + int(parts[index].shape[dim]), 1))
    return 1


def bounds(node: fx.Node) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of an ``aten.slice``: dim non-negative, bounds clamped to the input's size."""
    source = cast(fx.Node, node.args[0])
    names = ("dim", "start", "end", "step")
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    dim = cast(int, given.get("dim", 0)) % len(shape(source))
    size = shape(source)[dim]
    start, end, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(size)
    return dim, start, max(start, end), step


def _explicit(editor: Editor, node: fx.Node) -> int:
    source = cast(fx.Node, node.args[0])
    dim, start, end, step = bounds(node)
    if (start, end, step) == (0, shape(source)[dim], 1):
        editor.replace(node, source)
        return 1
    wanted = (source, dim, start, end, step)
    if node.args == wanted and not node.kwargs:
        return 0
    node.args, node.kwargs = wanted, {}
    return 1


def _joined(editor: Editor, node: fx.Node) -> int:
    """A chain of slice_scatters that covers every index of one dim of fresh memory is a concatenation."""
    pieces: dict[tuple[int, int], fx.Node] = {}
    dims = set()
    current: object = node
    while is_call(current, aten.slice_scatter.default):
        scatter = cast(fx.Node, current)
        names = ("dim", "start", "end", "step")
        given = dict(zip(names, scatter.args[2:], strict=False)) | dict(scatter.kwargs)
        dim = cast(int, given.get("dim", 0)) % len(shape(scatter))
        start, end, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(shape(scatter)[dim])
        if step != 1 or any(start < e and s < end for s, e in pieces):
            return 0
        pieces[start, end] = cast(fx.Node, scatter.args[1])
        dims.add(dim)
        current = scatter.args[0]
    order = sorted(pieces)
    covered = len(dims) == 1 and order[0][0] == 0 and order[-1][1] == shape(node)[min(dims)]
    if not covered or any(a[1] != b[0] for a, b in zip(order, order[1:], strict=False)):
        return 0
    if any(pieces[k].meta["val"].dtype != node.meta["val"].dtype for k in order):
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.cat.default, [pieces[k] for k in order], min(dims)))
    return 1


def _cat(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    wanted = (node.args[0], cast(int, dim) % len(shape(node)))
    if node.args == wanted and not node.kwargs:
        return 0
    node.args, node.kwargs = wanted, {}
    return 1
