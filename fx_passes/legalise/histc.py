"""histc(float(ids), E, 0, E - 1)  →  sum(ids == arange(E)): how often each integer occurs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.program import Program

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def run(program: Program, editor: Editor) -> int:
    """Replace every histc of integers with one bin per integer."""
    found = [n for n in editor.graph.nodes if is_call(n, aten.histc.default)]
    for node in found:
        with editor.before(node):
            editor.replace(node, _counts(editor, node))
    return len(found)


def _counts(editor: Editor, node: fx.Node) -> fx.Node:
    names = ("self", "bins", "min", "max")
    given: dict[str, Any] = {"bins": 100, "min": 0, "max": 0}
    given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    bins, low, high = given["bins"], given["min"], given["max"]
    x = given["self"]
    ids = x.args[0] if is_call(x, aten._to_copy.default) else x
    if dtype(ids) not in INTEGERS or low >= high or high - low != bins - 1 or int(low) != low:
        raise LegaliseError(
            node, "a count of integers with one bin for each", f"{dtype(ids)} in {bins} bins from {low} to {high}",
            "count with torch.bincount on integers or (ids[:, None] == torch.arange(n)).sum(0)",
        )
    total = ids.meta["val"].numel()
    device = node.meta["val"].device
    bin_ids = editor.call(aten.arange.start_step, int(low), int(high) + 1, 1, dtype=dtype(ids), device=device)
    hits = editor.call(aten.eq.Tensor, editor.reshape(ids, [total, 1]), editor.reshape(bin_ids, [1, *shape(bin_ids)]))
    wide = editor.call(aten._to_copy.default, hits, dtype=torch.float32)
    counts = editor.call(aten.sum.dim_IntList, wide, [0])
    return counts if dtype(node) == torch.float32 else editor.call(aten._to_copy.default, counts, dtype=dtype(node))
