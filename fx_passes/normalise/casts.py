"""A cast of a cast through a dtype that loses nothing  →  one cast; int64 → int32 → int64 of an index  →  the index."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program

_WIDER: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.bfloat16: frozenset({torch.float32, torch.float64}),
    torch.float16: frozenset({torch.float32, torch.float64}),
    torch.float32: frozenset({torch.float64}),
    torch.int8: frozenset({torch.int16, torch.int32, torch.int64}),
    torch.uint8: frozenset({torch.int16, torch.int32, torch.int64}),
    torch.int16: frozenset({torch.int32, torch.int64}),
    torch.int32: frozenset({torch.int64}),
}
"""Types of the same kind that hold every value of the key."""

INDEX_OPS = (aten.topk.default, aten.sort.default, aten.sort.stable)
LARGEST_INT32 = 2**31 - 1


def run(program: Program) -> int:
    """Shorten chains of casts whose middle changes no value."""
    return once(program, STEP)


def _visit(program: Program, editor: Editor, node: fx.Node) -> int:
    if not _is_cast(node) or not _is_cast(node.args[0]):
        return 0
    middle = cast(fx.Node, node.args[0])
    source = cast(fx.Node, middle.args[0])
    if not _keeps_values(source, dtype(middle)):
        return 0
    with editor.before(node):
        editor.replace(node, _cast(editor, source, dtype(node)))
    return 1


STEP = Step("casts", frozenset({aten._to_copy.default}), _visit)


def _is_cast(value: Any) -> bool:
    return is_call(value, aten._to_copy.default) and set(value.kwargs) == {"dtype"}


def _cast(editor: Editor, x: fx.Node, to: torch.dtype) -> fx.Node:
    return x if dtype(x) == to else editor.call(aten._to_copy.default, x, dtype=to)


def _keeps_values(x: fx.Node, through: torch.dtype) -> bool:
    if through == dtype(x) or through in _WIDER.get(dtype(x), ()):
        return True
    return dtype(x) == torch.int64 and through == torch.int32 and _small_index(x)


def _small_index(x: Any) -> bool:
    """Whether ``x`` is the indices of a topk or a sort over a dim that int32 can count."""
    if not (is_call(x, operator.getitem) and x.args[1] == 1 and is_call(x.args[0], *INDEX_OPS)):
        return False
    source = x.args[0].args[0]
    return max(shape(source), default=1) <= LARGEST_INT32
