"""Values whose last dim is two equal halves, ``cat(a, a)`` behind elementwise operations: find ``a``'s image, and back.

Rotary tables are built as cos(cat(freqs, freqs)); kernels want either one half or both.
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.rule import Context
from cannopy.fx_passes.graph import aten, is_call, shape


def unequal_at(node: object) -> fx.Node | None:
    """The value behind ``node`` for which it cannot be proved that its last dim holds the same values twice; None where
    all of it is proved."""
    if not isinstance(node, fx.Node):
        return None
    if is_call(node, aten.cat.default):
        parts, dim = node.args[0], node.args[1]
        assert isinstance(parts, list | tuple)
        return None if len(parts) == 2 and parts[0] is parts[1] and dim == len(shape(node)) - 1 else node
    if is_call(node, aten.reshape.default, aten.expand.default):
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        return unequal_at(inner) if shape(inner)[-1:] == shape(node)[-1:] else node
    return unequal_at(node.args[0]) if _elementwise(node) else node


def _elementwise(node: fx.Node) -> bool:
    """Whether each entry of ``node`` is a function of the same entry of its first argument alone."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return (pointwise or is_call(node, aten._to_copy.default)) and node.all_input_nodes == [node.args[0]]


def half_of(ctx: Context, node: fx.Node) -> fx.Node | None:
    """The first half of the last dim when both halves are provably equal, else None."""
    if unequal_at(node) is not None:
        return None
    rank, size = len(shape(node)), shape(node)[-1]
    return ctx.editor.call(aten.slice.Tensor, node, rank - 1, 0, size // 2, 1)


def doubled(ctx: Context, half: fx.Node) -> fx.Node:
    """cat(half, half): the value that ``half`` was sliced from when that has equal halves, else a concatenation."""
    reshapes: list[tuple[int, ...]] = []
    current = half
    while is_call(current, aten.reshape.default):
        reshapes.append(shape(current))
        current = current.args[0]  # type: ignore[assignment]
    if is_call(current, aten.slice.Tensor):
        whole, dim, start, end, step = current.args
        assert isinstance(whole, fx.Node)
        rank, size = len(shape(whole)), shape(whole)[-1]
        kept = all(r[-1:] == (size // 2,) for r in reshapes)
        if kept and (dim, start, end, step) == (rank - 1, 0, size // 2, 1) and unequal_at(whole) is None:
            return ctx.editor.reshape(whole, (*shape(half)[:-1], size))
    return ctx.editor.call(aten.cat.default, [half, half], len(shape(half)) - 1)
