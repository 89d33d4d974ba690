"""index_put(x, [i, j, …], value)  →  rows of x replaced by a scatter; with one number and a mask  →  where."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.legalise import scatter
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.program import Program

MASKS = (torch.bool, torch.uint8)


def run(program: Program, editor: Editor) -> int:
    """Replace every index_put."""
    found = [n for n in editor.graph.nodes if is_call(n, aten.index_put.default, aten._unsafe_index_put.default)]
    for node in found:
        with editor.before(node):
            _legalise(program, editor, node)
    return len(found)


def _legalise(program: Program, editor: Editor, node: fx.Node) -> None:
    base, indices, value = cast("tuple[fx.Node, list[fx.Node | None], fx.Node]", node.args[:3])
    accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(dtype(i) in MASKS for _, i in given):
        editor.replace(node, _masked(editor, node, base, given, value, bool(accumulate)))
        return
    size, dims = shape(node), [d for d, _ in given]
    rest = [d for d in range(len(size)) if d not in dims]
    where = torch.broadcast_shapes(*(shape(i) for _, i in given))
    # Indexed dims that stand together keep their place in the value; otherwise they come first (NumPy's rule).
    together = dims == list(range(dims[0], dims[0] + len(dims)))
    before = dims[0] if together else 0
    others = [size[d] for d in rest]
    whole = editor.expand(value, (*others[:before], *where, *others[before:]))
    order = [*range(before, before + len(where)), *range(before), *range(before + len(where), len(shape(whole)))]
    updates = editor.reshape(_permuted(editor, whole, order), [math.prod(where), math.prod(others)])
    lengths = [size[d] for d in dims]
    slots = scatter.flat(
        editor, [editor.expand(scatter.from_start(program, editor, i, size[d]), where) for d, i in given], lengths
    )
    front = [*dims, *rest]
    if front == list(range(len(size))) and not accumulate:
        scatter.write(program, editor, node, slots, updates, math.prod(lengths))
        return
    table = editor.reshape(_permuted(editor, base, front), [math.prod(lengths), math.prod(others)])
    new = scatter.table(editor, table, slots, updates, bool(accumulate))
    back = [front.index(d) for d in range(len(size))]
    editor.replace(node, _permuted(editor, editor.reshape(new, [*lengths, *others]), back))


def _permuted(editor: Editor, x: fx.Node, order: list[int]) -> fx.Node:
    return x if order == list(range(len(order))) else editor.call(aten.permute.default, x, order)


def _masked(
    editor: Editor, node: fx.Node, base: fx.Node, given: list[tuple[int, fx.Node]], value: fx.Node, accumulate: bool
) -> fx.Node:
    dim, mask = given[0]
    one_number: Any = value.meta["val"].numel() == 1
    if len(given) != 1 or accumulate or not one_number or dtype(mask) != torch.bool:
        raise LegaliseError(
            node, "one boolean mask and one number to write", f"{len(given)} indices, values {list(shape(value))}",
            "write it as torch.where(mask, values, x)",
        )
    tail = len(shape(node)) - dim - len(shape(mask))
    wide = editor.reshape(mask, [*shape(mask), *[1] * tail])
    return editor.call(aten.where.self, wide, editor.reshape(value, []), base)
