"""x * x, square(x), x ** 2.0  →  pow(x, 2); 1 / sqrt(x), x ** -0.5  →  rsqrt(x); y / sqrt(x)  →  y * rsqrt(x);
sum(x) / n  →  mean(x); mean(x, -1).unsqueeze(-1), sum(…)  →  mean(x, -1, keepdim); x * sigmoid(x)  →  silu(x);
scalar overloads  →  Tensor ones; x + full([], 2)  →  x + 2;
arange(1) + x  →  reshape(x), because arange(1) is zero."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.constants import constant
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

ENTRYWISE = (aten.add.Tensor, aten.mul.Tensor, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default,
             aten.pow.Tensor_Scalar, aten._to_copy.default)
"""Functions of each entry, where all operands but the first are numbers."""

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
               aten.reciprocal.default, aten.sub.Tensor, aten.div.Tensor, aten.reshape.default}),
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
    gated = _gated(node)
    if gated is not None:
        with editor.before(node):
            return editor.call(aten.silu.default, gated)
    root = _inverse_root(node)
    if root is not None:
        with editor.before(node):
            return editor.call(aten.rsqrt.default, root)
    if is_call(node, aten.div.Tensor) and not node.kwargs:
        found = _over_root(editor, node) or _mean(editor, node)
        if found is not None:
            return found
    if is_call(node, aten.reshape.default):
        return _kept_dim(editor, node)
    return _number_operand(editor, node) or _plus_zero_index(editor, node)


def _gated(node: fx.Node) -> fx.Node | None:
    """x of ``x * sigmoid(x)``."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for x, gate in (node.args[:2], node.args[1::-1]):
        if is_call(gate, aten.sigmoid.default) and gate.args[0] is x:  # type: ignore[union-attr]
            return x if isinstance(x, fx.Node) and dtype(x) == dtype(node) else None
    return None


def _over_root(editor: Editor, node: fx.Node) -> fx.Node | None:
    """``y / sqrt(x)``."""
    y, root = node.args
    inner = root.args[0] if is_call(root, aten.sqrt.default) else None  # type: ignore[union-attr]
    if not isinstance(y, fx.Node) or not isinstance(inner, fx.Node) or dtype(inner) not in ONE_ROUNDING:
        return None
    if dtype(inner) != dtype(node):
        return None
    with editor.before(node):
        return editor.call(aten.mul.Tensor, y, editor.call(aten.rsqrt.default, inner))


def _mean(editor: Editor, node: fx.Node) -> fx.Node | None:
    """``sum(x) / n`` with n the number of summed entries."""
    total, count = node.args
    if not is_call(total, aten.sum.dim_IntList) or isinstance(count, fx.Node):
        return None
    assert isinstance(total, fx.Node)
    x, dims = total.args[:2]
    if not isinstance(x, fx.Node) or not dims or dtype(x) not in ONE_ROUNDING or total.kwargs:
        return None
    if count != math.prod(shape(x)[d] for d in cast("list[int]", dims)):
        return None
    with editor.before(node):
        return editor.call(aten.mean.dim, x, dims, total.args[2] if len(total.args) > 2 else False)


def _kept_dim(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A mean or sum over the last dim whose only reader, perhaps behind functions of each entry, puts that dim back
    with size 1."""
    total, between = cast(fx.Node, node.args[0]), list[fx.Node]()
    while is_call(total, *ENTRYWISE) and len(total.users) == 1 and _of_one(total):
        between.append(total)
        total = cast(fx.Node, total.args[0])
    if not is_call(total, aten.mean.dim, aten.sum.dim_IntList) or total.kwargs or len(total.users) > 1:
        return None
    x, dims = total.args[:2]
    if not isinstance(x, fx.Node) or (len(total.args) > 2 and total.args[2]):
        return None
    if dims not in ([-1], [len(shape(x)) - 1]) or list(shape(node)) != [*shape(total), 1]:
        return None
    with editor.before(node):
        value = editor.call(total.target, x, dims, True)
        for step in reversed(between):
            value = editor.call(step.target, value, *step.args[1:], **step.kwargs)
        return value


def _of_one(node: fx.Node) -> bool:
    return isinstance(node.args[0], fx.Node) and not any(isinstance(a, fx.Node) for a in node.args[1:])


def _number_operand(editor: Editor, node: fx.Node) -> fx.Node | None:
    """A tensor of one number that broadcasts becomes the number, where that keeps shape and dtype."""
    if not is_call(node, aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor) or node.kwargs:
        return None
    orders = [node.args[:2]] if is_call(node, aten.sub.Tensor, aten.div.Tensor) else [node.args[:2], node.args[1::-1]]
    for x, filled in orders:
        value = constant(filled)
        if not isinstance(x, fx.Node) or not isinstance(filled, fx.Node) or not isinstance(value, float):
            continue
        if dtype(filled) in ONE_ROUNDING and (dtype(x), shape(x)) == (dtype(node), shape(node)):
            with editor.before(node):
                return editor.call(node.target, x, value)
    return None


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
