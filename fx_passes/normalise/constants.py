"""zeros, ones, zeros_like, new_full, scalar_tensor, …  →  ``aten.full(size, value, dtype=…, device=…)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

FIXED: dict[Any, int] = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
GIVEN: dict[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
"""Position of the value among the arguments."""


def run(program: Program) -> int:
    """Use one spelling for tensors that hold one number."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    value = constant(node)
    if value is None:
        return 0
    size, options = list(shape(node)), {"dtype": dtype(node), "device": node.meta["val"].device}
    if node.target is aten.full.default and node.args == (size, value) and dict(node.kwargs) == options:
        return 0
    with editor.before(node):
        editor.replace(node, editor.call(aten.full.default, size, value, **options))
    return 1


STEP = Step("constants", frozenset({*FIXED, *GIVEN}), _visit)


def constant(node: Any) -> bool | int | float | None:
    """The number that fills ``node``, as its dtype holds it, or None when it is no such tensor."""
    if not isinstance(node, fx.Node):
        return None
    if is_call(node, *FIXED):
        given: Any = FIXED[node.target]
    elif is_call(node, *GIVEN):
        position = GIVEN[node.target]
        given = node.args[position] if len(node.args) > position else None
    else:
        return None
    if isinstance(given, bool | int | float):
        return _held(given, dtype(node))
    return None


def _held(value: bool | int | float, as_type: torch.dtype) -> bool | int | float | None:
    if as_type == torch.bool:
        return bool(value)
    if as_type.is_complex:
        return None
    return float(value) if as_type.is_floating_point else int(value)
