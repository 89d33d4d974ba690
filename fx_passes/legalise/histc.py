"""histc(x, n, low, high)  →  sum(bin(x) == arange(n)); integers with a bin each: sum(ids == arange(low, high+1))."""

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
    if low >= high:
        raise LegaliseError(
            node, "a count with constant bounds", f"{dtype(x)} in {bins} bins between its least and largest value",
            "pass min and max, or count with (ids[:, None] == torch.arange(n)).sum(0)",
        )
    if dtype(ids) in INTEGERS and high - low == bins - 1 and int(low) == low:
        value, first, last = ids, int(low), int(high)
    else:
        value, first, last = _bin(editor, x, bins, float(low), float(high)), 0, bins - 1
    total = value.meta["val"].numel()
    device = node.meta["val"].device
    bin_ids = editor.call(aten.arange.start_step, first, last + 1, 1, dtype=dtype(value), device=device)
    hits = editor.call(aten.eq.Tensor, editor.reshape(value, [total, 1]), editor.reshape(bin_ids, [1, *shape(bin_ids)]))
    wide = editor.call(aten._to_copy.default, hits, dtype=torch.float32)
    counts = editor.call(aten.sum.dim_IntList, wide, [0])
    return counts if dtype(node) == torch.float32 else editor.call(aten._to_copy.default, counts, dtype=dtype(node))


def _bin(editor: Editor, x: fx.Node, bins: int, low: float, high: float) -> fx.Node:
    """The bin of each value of ``x``, a float; -1 outside of ``[low, high]``. ``high`` itself is in the last bin."""
    shifted = editor.call(aten.sub.Tensor, x, low)
    place = editor.call(aten.div.Tensor, editor.call(aten.mul.Tensor, shifted, bins), high - low)
    found = editor.call(aten.clamp.default, editor.call(aten.floor.default, place), None, bins - 1)
    outside = editor.call(
        aten.logical_or.default, editor.call(aten.lt.Scalar, x, low), editor.call(aten.gt.Scalar, x, high)
    )
    return editor.call(aten.masked_fill.Scalar, found, outside, -1.0)
