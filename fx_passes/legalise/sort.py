"""sort.stable(x)  →  sort(x) where the order of equal values is free; of int32 or less  →  sort(x · n + place)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.program import Program

NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)
MOST_PLACES = 2**31


def run(program: Program, editor: Editor) -> int:
    """Replace every stable sort."""
    found = [n for n in editor.graph.nodes if is_call(n, aten.sort.stable)]
    for node in found:
        x: Any = node.args[0]
        dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else -1)
        descending = node.kwargs.get("descending", node.args[2] if len(node.args) > 2 else False)
        with editor.before(node):
            if not node.kwargs.get("stable"):
                editor.replace(node, editor.call(aten.sort.default, x, dim, descending))
            else:
                _stable(editor, node, x, int(dim) % len(shape(x)), bool(descending))
    return len(found)


def _stable(editor: Editor, node: fx.Node, x: fx.Node, dim: int, descending: bool) -> None:
    count = shape(x)[dim]
    source = x.args[0] if is_call(x, aten._to_copy.default) and dtype(x) == torch.int64 else x
    if not isinstance(source, fx.Node) or dtype(source) not in NARROW or count >= MOST_PLACES:
        raise LegaliseError(node, "a stable sort of integers of at most 32 bits", f"one of {dtype(x)}",
                            "sort with stable=False, or cast the keys to int32")
    device = x.meta["val"].device
    place = editor.call(aten.arange.start_step, 0, count, 1, dtype=torch.int64, device=device)
    if descending:
        place = editor.call(aten.arange.start_step, count - 1, -1, -1, dtype=torch.int64, device=device)
    place = editor.reshape(place, [count if d == dim else 1 for d in range(len(shape(x)))])
    wide = editor.call(aten._to_copy.default, source, dtype=torch.int64)
    key = editor.call(aten.add.Tensor, editor.call(aten.mul.Tensor, wide, count), place)
    order = editor.item(editor.call(aten.sort.default, key, dim, descending), 1)
    for user in list(node.users):
        assert is_call(user, operator.getitem)
        new = order if user.args[1] == 1 else editor.call(aten.gather.default, x, dim, order)
        editor.replace(user, new)
