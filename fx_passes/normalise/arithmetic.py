"""x * x, square(x), x ** 2.0  →  pow(x, 2); 1 / sqrt(x), x ** -0.5  →  rsqrt(x); scalar overloads  →  Tensor ones;
arange(1) + x  →  reshape(x), because arange(1) is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

SCALAR_OVERLOADS = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
ONE_ROUNDING = (torch.float32, torch.float64)
"""Where rsqrt(x) is within two units in the last place of 1 / sqrt(x): the narrow types round the root to 8 or 11
bits before it is inverted."""

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def run(program: Program) -> int:
    """Use one spelling per formula."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    changes = _tensor_overload(node)
    replacement = _respelled(editor, node)
    if replacement is not None:
        editor.replace(node, replacement)
        changes += 1
    return changes


STEP = Step(
    "arithmetic",
    frozenset({*SCALAR_OVERLOADS, aten.mul.Tensor, aten.add.Tensor, aten.pow.Tensor_Scalar, aten.square.default,
               aten.reciprocal.default}),
    _visit,
)


def _tensor_overload(node: fx.Node) -> int:
    if node.target not in SCALAR_OVERLOADS:
        return 0
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    node.target = SCALAR_OVERLOADS[node.target]
    node.args = node.args[:2]
    node.kwargs = {} if alpha == 1 else {"alpha": alpha}
    return 1


def _respelled(editor: Editor, node: fx.Node) -> fx.Node | None:
    squared = _squared(node)
    if squared is not None and dtype(squared) == dtype(node) and dtype(node) != torch.bool:
        with editor.before(node):
            return editor.call(aten.pow.Tensor_Scalar, squared, 2)
    root = _inverse_root(node)
    if root is not None:
        with editor.before(node):
            return editor.call(aten.rsqrt.default, root)
    return _plus_zero_index(editor, node)


def _squared(node: fx.Node) -> fx.Node | None:
    again = is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]
    power = is_call(node, aten.pow.Tensor_Scalar) and isinstance(node.args[1], float) and node.args[1] == 2
    if again or power or is_call(node, aten.square.default):
        x = node.args[0]
        return x if isinstance(x, fx.Node) else None
    return None


def _inverse_root(node: fx.Node) -> fx.Node | None:
    x: Any = node.args[0] if node.args else None
    if not isinstance(x, fx.Node):
        return None
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5 and dtype(x).is_floating_point:
        return x
    if is_call(node, aten.reciprocal.default) and is_call(x, aten.sqrt.default):
        inner = x.args[0]
        if isinstance(inner, fx.Node) and dtype(inner) in ONE_ROUNDING:
            return inner
    return None


def _plus_zero_index(editor: Editor, node: fx.Node) -> fx.Node | None:
    """``arange(1) + x`` of integers, whichever comes first."""
    if not is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    for zero, x in (node.args[:2], node.args[1::-1]):
        if _is_zero_index(zero) and isinstance(x, fx.Node) and dtype(x) in INTEGERS:
            with editor.before(node):
                if dtype(x) != dtype(node):
                    x = editor.call(aten._to_copy.default, x, dtype=dtype(node))
                same_size = node.meta["val"].numel() == x.meta["val"].numel()
                return editor.reshape(x, shape(node)) if same_size else editor.expand(x, shape(node))
    return None


def _is_zero_index(value: Any) -> bool:
    if not is_call(value, aten.arange.default, aten.arange.start, aten.arange.start_step) or shape(value) != (1,):
        return False
    starts_at = 0 if value.target is aten.arange.default else value.args[0]
    return starts_at == 0 and not dtype(value).is_floating_point
