"""mm(reshape(x), permute(W)) and addmm  →  ``aten.linear(x, W, bias)``; expand + reshape + bmm  →  ``aten.matmul``."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.normalise.views import RESHAPES
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program


def run(program: Program) -> int:
    """Recover linear layers and batched matrix products from their decomposed forms."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if is_call(node, aten.mm.default):
        return _linear(editor, node, node.args[0], node.args[1], None)
    if is_call(node, aten.addmm.default):
        return 0 if node.kwargs else _linear(editor, node, node.args[1], node.args[2], node.args[0])
    return _matmul(editor, node)


STEP = Step("linears", frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default}), _visit)


def _linear(editor: Editor, node: fx.Node, x: Any, weight_t: Any, bias: Any) -> int:
    if not (is_call(weight_t, aten.permute.default) and weight_t.args[1] == [1, 0]):
        return 0
    if bias is not None and len(shape(bias)) != 1:
        return 0
    weight = weight_t.args[0]
    source = x.args[0] if is_call(x, aten.reshape.default) and _folded_here(node, x) else x
    with editor.before(node):
        linear = editor.call(aten.linear.default, source, weight, *([bias] if bias is not None else []))
        editor.replace(node, editor.reshape(linear, shape(node)))
    return 1


def _folded_here(node: fx.Node, x: fx.Node) -> bool:
    """Whether the tokens of ``x`` [T, in] are folded for the product ``node`` alone: a reader has (..., out) again.
    A model that folds them itself goes on with (T, out)."""
    size = shape(cast(fx.Node, x.args[0]))
    kept = len(size) >= 2 and size[-1] == shape(x)[-1]
    return kept and any(is_call(u, *RESHAPES) and shape(u)[:len(size) - 1] == size[:-1] for u in node.users)


def _unfolded(x: Any) -> fx.Node:
    """The operand of a bmm before ``expand`` and ``reshape`` folded its leading dims into one."""
    if is_call(x, aten.reshape.default):
        inner = cast(fx.Node, x.args[0])
        size = shape(inner)
        if len(size) > 3 and size[-2:] == shape(x)[-2:]:
            return inner
    return cast(fx.Node, x)


def _matmul(editor: Editor, node: fx.Node) -> int:
    operands = cast("list[fx.Node]", list(node.args[:2]))
    unfolded = [_unfolded(x) for x in operands]
    rank = max(len(shape(x)) for x in unfolded)
    batch = next(shape(x)[:-2] for x in unfolded if len(shape(x)) == rank)
    sizes = [_lifted(shape(x), batch) for x in unfolded]
    if None in sizes:
        return _product(editor, node, operands, [shape(x) for x in operands])
    return _product(editor, node, [_unexpanded(x) for x in unfolded], cast("list[tuple[int, ...]]", sizes))


def _lifted(size: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...] | None:
    """``size`` with its leading dim unfolded like ``batch``; None when it is not a fold of those dims."""
    if size[:-2] == batch:
        return size
    if len(size) == 3 and size[0] == math.prod(batch):
        return (*batch, *size[-2:])
    return None


def _product(editor: Editor, node: fx.Node, operands: list[fx.Node], sizes: list[tuple[int, ...]]) -> int:
    with editor.before(node):
        a, b = (x if len(shape(x)) == len(size) else editor.reshape(x, size)
                for x, size in zip(operands, sizes, strict=True))
        product = editor.call(aten.matmul.default, a, b)
        editor.replace(node, editor.reshape(product, shape(node)))
    return 1


def _unexpanded(x: fx.Node) -> fx.Node:
    """``x`` before an expand of its leading dims: matmul broadcasts by itself."""
    if is_call(x, aten.expand.default):
        inner = cast(fx.Node, x.args[0])
        if len(shape(inner)) == len(shape(x)) and shape(inner)[-2:] == shape(x)[-2:]:
            return inner
    return x
