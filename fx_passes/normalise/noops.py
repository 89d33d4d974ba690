"""x.to(same dtype), clone, alias, detach, expand to the same shape, x * 1, x + 0, x / 1  →  x."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program

COPIES = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default, aten.to.dtype)


def run(program: Program) -> int:
    """Remove operations that return their input's value in the same shape and dtype."""
    editor = Editor(program.gm)
    changes = 0
    for node in list(editor.graph.nodes):
        source = _passed_through(node)
        if source is not None:
            editor.replace(node, source)
            changes += 1
        elif is_call(node, aten.expand.default):
            changes += _explicit_expand(node)
        elif is_call(node, aten._to_copy.default):
            changes += _plain_cast(editor, node)
    editor.sweep()
    return changes


def _passed_through(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    x = node.args[0]
    if not isinstance(x.meta.get("val"), torch.Tensor) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if shape(node) != shape(x) or dtype(node) != dtype(x):
        return None
    if is_call(node, *COPIES, *CASTS, aten.expand.default, aten.contiguous.default):
        return x
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and _is_number(node.args[1], 1):
        return x
    plain_alpha = node.kwargs.get("alpha", 1) == 1 and not node.kwargs.get("rounding_mode")
    adds = is_call(node, aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor)
    # x + 0.0 turns -0.0 into 0.0; only integers are safe to skip.
    if adds and plain_alpha and _is_number(node.args[1], 0) and not dtype(x).is_floating_point:
        return x
    return None


def _is_number(value: Any, wanted: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == wanted


def _explicit_expand(node: fx.Node) -> int:
    wanted = list(shape(node))
    if list(node.args[1]) == wanted:  # type: ignore[arg-type]
        return 0
    node.args = (node.args[0], wanted)
    return 1


def _plain_cast(editor: Editor, node: fx.Node) -> int:
    """`_to_copy` that changes only the dtype carries only the dtype."""
    if set(node.kwargs) == {"dtype"}:
        return 0
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if node.meta["val"].device != x.meta["val"].device:
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten._to_copy.default, x, dtype=dtype(node)))
    return 1
