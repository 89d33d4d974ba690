"""index_copy(cache [.., L, D], dim, index, value)  →  npu_scatter_nd_update(rows [B·L, D], index + b·L, value rows)."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.legalise import scatter
from cannopy.fx_passes.program import Program


def run(program: Program, editor: Editor) -> int:
    """Replace every index_copy."""
    found = [n for n in editor.graph.nodes if is_call(n, aten.index_copy.default)]
    for node in found:
        _, dim, index, value = cast("tuple[fx.Node, int, fx.Node, fx.Node]", node.args)
        size = shape(node) or (1,)
        dim %= len(size)
        count = shape(index)[0] if shape(index) else 1
        lead, width = math.prod(size[:dim]), math.prod(size[dim + 1 :])
        with editor.before(node):
            slots = _slots(editor, index, count, lead, size[dim])
            updates = editor.reshape(value, [lead * count, width])
            scatter.write(program, editor, node, slots, updates, lead * size[dim])
    return len(found)


def _slots(editor: Editor, index: fx.Node, count: int, lead: int, length: int) -> fx.Node:
    """Row numbers ``[lead · count]``, int64."""
    index = editor.reshape(index, [count])
    if lead == 1:
        return index
    device = index.meta["val"].device
    first = editor.call(aten.arange.start_step, 0, lead * length, length, dtype=torch.int64, device=device)
    table = editor.call(aten.add.Tensor, editor.reshape(first, [lead, 1]), editor.reshape(index, [1, count]))
    return editor.reshape(table, [lead * count])
