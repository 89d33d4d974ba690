"""view, _unsafe_view, unsqueeze, squeeze, flatten, chains of them, the only entry of a dim that is selected  →  one
``aten.reshape`` with explicit sizes;
t, transpose, permute  →  ``aten.permute`` with explicit, non-negative dims (chains composed)."""

from __future__ import annotations

from typing import cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

RESHAPES = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def run(program: Program) -> int:
    """Rewrite every shape operation; a reshape of a reshape becomes one, one to the same shape disappears."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if is_call(node, aten.select.int):
        return _only_entry(editor, node)
    return _reshape(editor, node) if is_call(node, *RESHAPES) else _permute(editor, node)


STEP = Step("views", frozenset({*RESHAPES, *TRANSPOSES, aten.select.int}), _visit)


def _only_entry(editor: Editor, node: fx.Node) -> int:
    source = cast(fx.Node, node.args[0])
    if shape(source)[cast(int, node.args[1])] != 1:
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.reshape.default, source, list(shape(node))))
    return 1


def _reshape(editor: Editor, node: fx.Node) -> int:
    size = list(shape(node))
    source = cast(fx.Node, node.args[0])
    while is_call(source, *RESHAPES):
        source = cast(fx.Node, source.args[0])
    if list(shape(source)) == size:
        editor.replace(node, source)
        return 1
    if node.target is aten.reshape.default and node.args == (source, size):
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.reshape.default, source, size))
    return 1


def permutation(node: fx.Node) -> list[int]:
    """The dims of a transpose-like node as a permutation of its input's dims."""
    rank = len(shape(node))
    if rank == 0:
        return []
    if is_call(node, aten.t.default):
        return list(reversed(range(rank)))
    if is_call(node, aten.transpose.int):
        a, b = (int(cast(int, d)) % rank for d in node.args[1:3])
        dims = list(range(rank))
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    return [int(d) % rank for d in cast("list[int]", node.args[1])]


def _permute(editor: Editor, node: fx.Node) -> int:
    dims = permutation(node)
    source = cast(fx.Node, node.args[0])
    while is_call(source, *TRANSPOSES):
        inner = permutation(source)
        dims = [inner[d] for d in dims]
        source = cast(fx.Node, source.args[0])
    if dims == list(range(len(dims))):
        editor.replace(node, source)
        return 1
    if node.target is aten.permute.default and node.args == (source, dims):
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.permute.default, source, dims))
    return 1
