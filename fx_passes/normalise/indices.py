"""Indices whose range is known: tests against bounds that they cannot reach, gathers of gathers, the rows of a sort.

    masked_fill(x, ids >= n, v)  →  x                     clamp(ids, 0, n - 1)  →  ids       ids are below n
    x[a][b]  →  x[a[b]]                                    v[sort(v).indices]  →  sort(v).values
    (0, 0, 1, 1, 2, 2, …)[p]  →  p // repeats              p is below the size

The bounds come from what made the indices: the places of a top-k or a sort, arange, and what keeps their values.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

SORTS = (aten.sort.default, aten.sort.stable)
KEEPS = (
    aten.reshape.default, aten.view.default, aten.expand.default, aten.permute.default, aten.slice.Tensor,
    aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default, aten.index.Tensor, aten.gather.default,
)
"""Operations whose results are values of their first operand."""

COMPARES = {
    aten.ge.Scalar: lambda n, top: n > top,
    aten.gt.Scalar: lambda n, top: n >= top,
    aten.eq.Scalar: lambda n, top: n > top or n < 0,
    aten.lt.Scalar: lambda n, top: n <= 0,
    aten.le.Scalar: lambda n, top: n < 0,
}
"""Whether a comparison with ``n`` is false for every value from 0 to ``top``."""


def run(program: Program) -> int:
    """Rewrite what the bounds of indices decide."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if is_call(node, aten.clamp.default):
        return _unclamped(editor, node)
    return _index(editor, node) if is_call(node, aten.index.Tensor) else _unmasked(editor, node)


INDEXED = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.clamp.default, aten.index.Tensor})
STEP = Step("indices", INDEXED, _visit, far=INDEXED)
"""The bounds of an index may come from any distance."""


def largest(node: object) -> int | None:
    """The largest value that an integer ``node``, none of whose values is negative, can have; None when unknown."""
    for _ in range(64):  # longer chains than models have
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return None
        if is_call(node, operator.getitem):
            source, output = cast("tuple[fx.Node, int]", node.args)
            if is_call(source, aten.topk.default, *SORTS) and output == 1:
                return _places(source)
            if not (is_call(source, *SORTS) and output == 0):
                return None
            node = source.args[0]
        elif is_call(node, aten.argsort.default):
            return _places(node)
        elif is_call(node, aten.arange.default):
            return int(node.meta["val"].shape[0]) - 1
        elif is_call(node, *KEEPS) or (is_call(node, aten._to_copy.default) and _is_integer(node)):
            node = node.args[0]
        elif is_call(node, aten.floor_divide.default) and isinstance(node.args[1], int) and node.args[1] > 0:
            below = largest(node.args[0])
            return None if below is None else below // node.args[1]
        else:
            return None
    return None


def _is_integer(node: fx.Node) -> bool:
    return dtype(node) in (torch.int32, torch.int64)


def _places(node: fx.Node) -> int:
    """The last place along the dim that a top-k or a sort orders."""
    schema = cast(Any, node.target)._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return shape(cast(fx.Node, node.args[0]))[int(given["dim"])] - 1


def _never(mask: object) -> bool:
    """Whether no element of a mask is set."""
    while is_call(mask, *KEEPS):
        mask = cast(fx.Node, mask).args[0]
    if not (isinstance(mask, fx.Node) and mask.target in COMPARES and isinstance(mask.args[1], int)):
        return False
    top = largest(mask.args[0])
    return top is not None and COMPARES[mask.target](mask.args[1], top)


def _unmasked(editor: Editor, node: fx.Node) -> int:
    x, mask = node.args[0], node.args[1]
    if not isinstance(x, fx.Node) or shape(x) != shape(node) or not _never(mask):
        return 0
    editor.replace(node, x)
    return 1


def _unclamped(editor: Editor, node: fx.Node) -> int:
    x = cast(fx.Node, node.args[0])
    given: dict[str, Any] = dict(zip(("min", "max"), node.args[1:], strict=False)) | dict(node.kwargs)
    low, high = given.get("min"), given.get("max")
    top = largest(x)
    if top is None or not _is_integer(x) or not (low is None or low <= 0) or not (high is None or high >= top):
        return 0
    editor.replace(node, x)
    return 1


def _index(editor: Editor, node: fx.Node) -> int:
    source, index = node.args[0], _one_row_index(node)
    if index is None or not isinstance(source, fx.Node):
        return 0
    if _is_permutation_of(index, source):
        with editor.before(node):
            editor.replace(node, editor.item(cast(fx.Node, index.args[0]), 0))
        return 1
    repeats = _repeats(source)
    top = largest(index)
    if repeats is not None and top is not None and top < shape(source)[0]:
        with editor.before(node):
            editor.replace(node, editor.call(aten.floor_divide.default, index, repeats))
        return 1
    rows = _one_row_index(source) if is_call(source, aten.index.Tensor) else None
    if rows is None:
        return 0
    with editor.before(node):
        chosen = editor.call(aten.index.Tensor, rows, [index])
        editor.replace(node, editor.call(aten.index.Tensor, source.args[0], [chosen]))
    return 1


def _one_row_index(node: fx.Node) -> fx.Node | None:
    """The index of ``x[i]`` with integers i [n]."""
    if node.kwargs or not isinstance(node.args[1], list | tuple) or len(node.args[1]) != 1:
        return None
    index = node.args[1][0]
    return index if isinstance(index, fx.Node) and len(shape(index)) == 1 and _is_integer(index) else None


def _is_permutation_of(index: fx.Node, values: fx.Node) -> bool:
    """Whether ``index`` is the second output of a sort of the flat ``values``."""
    if not is_call(index, operator.getitem) or index.args[1] != 1:
        return False
    sort = cast(fx.Node, index.args[0])
    return is_call(sort, *SORTS) and sort.args[0] is values and len(shape(values)) == 1


def _repeats(node: fx.Node) -> int | None:
    """K when ``node`` is 0 to n - 1, each K times in a row: arange(n)[:, None].expand(n, K).reshape(-1)."""
    if not (is_call(node, aten.reshape.default) and is_call(node.args[0], aten.expand.default)):
        return None
    expand = cast(fx.Node, node.args[0])
    column = expand.args[0]
    while is_call(column, aten.reshape.default):
        column = cast(fx.Node, column).args[0]
    size = shape(expand)
    if not is_call(column, aten.arange.default) or len(shape(node)) != 1 or len(size) != 2:
        return None
    arange = cast(fx.Node, column)
    return size[1] if len(arange.args) == 1 and shape(arange) == size[:1] == (arange.args[0],) and \
        shape(cast(fx.Node, expand.args[0])) == (size[0], 1) else None
