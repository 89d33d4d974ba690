"""split, split_with_sizes, chunk, narrow + getitem  →  ``aten.slice(x, dim, start, end, step)`` with explicit bounds;
select_scatter  →  slice_scatter; a slice of a slice_scatter reads the written part or what is behind it;
slice_scatters that cover a whole dim  →  ``aten.cat``; concatenation dims become non-negative."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any, cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

SPLITS = (aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes, aten.chunk.default)


def run(program: Program) -> int:
    """Rewrite every way of taking or joining parts of a tensor along one dim."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if is_call(node, operator.getitem):
        return _part(editor, node) if is_call(node.args[0], *SPLITS) else 0
    if is_call(node, aten.slice.Tensor):
        return _explicit(editor, node) or _behind_scatter(editor, node)
    if is_call(node, aten.select_scatter.default):
        return _selected(editor, node)
    return _joined(editor, node) if is_call(node, aten.slice_scatter.default) else _cat(node)


STEP = Step(
    "slices",
    frozenset({operator.getitem, aten.slice.Tensor, aten.select_scatter.default, aten.slice_scatter.default,
               aten.cat.default}),
    _visit,
)


def _part(editor: Editor, node: fx.Node) -> int:
    split = cast(fx.Node, node.args[0])
    parts = split.meta["val"]
    index = cast(int, node.args[1]) % len(parts)
    source = cast(fx.Node, split.args[0])
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    dim = cast(int, dim) % len(shape(source))
    start = sum(int(p.shape[dim]) for p in parts[:index])
    end = start + int(parts[index].shape[dim])
    with editor.before(node):
        editor.replace(node, editor.call(aten.slice.Tensor, source, dim, start, end, 1))
    return 1


def bounds(node: fx.Node) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of an ``aten.slice``: dim non-negative, bounds clamped to the input's size."""
    return _bounds(shape(cast(fx.Node, node.args[0])), node.args[1:], node.kwargs)


def scatter_bounds(node: fx.Node) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of an ``aten.slice_scatter``, as `bounds` of a slice."""
    return _bounds(shape(node), node.args[2:], node.kwargs)


def _bounds(size: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, int, int]:
    given = dict(zip(("dim", "start", "end", "step"), args, strict=False)) | kwargs
    dim = given.get("dim", 0) % len(size)
    start, end, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(size[dim])
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


def _behind_scatter(editor: Editor, node: fx.Node) -> int:
    """A slice within the written range reads the written value, one beside it reads the tensor behind."""
    scatter = node.args[0]
    if not is_call(scatter, aten.slice_scatter.default):
        return 0
    scatter = cast(fx.Node, scatter)
    behind, written = scatter.args[:2]
    dim, start, end, step = bounds(node)
    at, low, high, stride = scatter_bounds(scatter)
    if dim != at or step != 1 or stride != 1:
        return 0
    if end <= low or high <= start:
        new = (behind, dim, start, end, 1)
    elif low <= start and end <= high and dtype(cast(fx.Node, written)) == dtype(scatter):
        new = (written, dim, start - low, end - low, 1)
    else:
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.slice.Tensor, *new))
    return 1


def _selected(editor: Editor, node: fx.Node) -> int:
    base, value, dim, index = cast("tuple[fx.Node, fx.Node, int, int]", node.args[:4])
    dim %= len(shape(node))
    index %= shape(node)[dim]
    with editor.before(node):
        row = editor.reshape(value, (*shape(node)[:dim], 1, *shape(node)[dim + 1 :]))
        editor.replace(node, editor.call(aten.slice_scatter.default, base, row, dim, index, index + 1))
    return 1


def _joined(editor: Editor, node: fx.Node) -> int:
    """A chain of slice_scatters that covers every index of one dim leaves nothing of the tensor at its start."""
    pieces: dict[tuple[int, int], fx.Node] = {}
    dims: set[int] = set()
    current: object = node
    while is_call(current, aten.slice_scatter.default) and not _covers(pieces, shape(node), dims):
        scatter = cast(fx.Node, current)
        dim, start, end, step = scatter_bounds(scatter)
        if step != 1 or any(start < e and s < end for s, e in pieces):
            return 0
        if start < end:
            pieces[start, end] = cast(fx.Node, scatter.args[1])
        dims.add(dim)
        current = scatter.args[0]
    if not _covers(pieces, shape(node), dims) or any(dtype(p) != dtype(node) for p in pieces.values()):
        return 0
    parts = [pieces[k] for k in sorted(pieces)]
    with editor.before(node):
        editor.replace(node, parts[0] if len(parts) == 1 else editor.call(aten.cat.default, parts, min(dims)))
    return 1


def _covers(pieces: dict[tuple[int, int], fx.Node], size: tuple[int, ...], dims: set[int]) -> bool:
    if len(dims) != 1 or not pieces:
        return False
    order = sorted(pieces)
    whole = order[0][0] == 0 and order[-1][1] == size[min(dims)]
    return whole and all(a[1] == b[0] for a, b in pairwise(order))


def _cat(node: fx.Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    wanted = (node.args[0], cast(int, dim) % len(shape(node)))
    if node.args == wanted and not node.kwargs:
        return 0
    node.args, node.kwargs = wanted, {}
    return 1
