"""Values whose last dim is two equal halves, ``cat(a, a)`` behind elementwise operations: find ``a``'s image, and back.

Rotary tables are built as cos(cat(freqs, freqs)); kernels want either one half or both.
"""

from __future__ import annotations

from torch import fx

from cannopy.fusion_rules.engine.rule import Context
from cannopy.fx_passes.graph import aten, is_call, shape

ELEMENTWISE = (
    aten.cos.default,
    aten.sin.default,
    aten._to_copy.default,
    aten.mul.Tensor,
    aten.neg.default,
)


def _equal_halves(node: object) -> bool:
    """Whether the last dim of ``node`` provably holds the same values twice."""
    if not isinstance(node, fx.Node):
        return False
    if is_call(node, aten.cat.default):
        parts, dim = node.args[0], node.args[1]
        assert isinstance(parts, list | tuple)
        return len(parts) == 2 and parts[0] is parts[1] and bool(dim == len(shape(node)) - 1)
    if is_call(node, aten.reshape.default, aten.expand.default):
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        return shape(inner)[-1:] == shape(node)[-1:] and _equal_halves(inner)
    if is_call(node, *ELEMENTWISE):
        others = [a for a in node.args[1:] if isinstance(a, fx.Node)]
        return not others and _equal_halves(node.args[0])
    return False


def half_of(ctx: Context, node: fx.Node, dry: bool = False) -> fx.Node | None:
    """The first half of the last dim when both halves are provably equal, else None. ``dry`` only tells."""
    if not _equal_halves(node):
        return None
    if dry:
        return node
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
        if kept and (dim, start, end, step) == (rank - 1, 0, size // 2, 1) and _equal_halves(whole):
            return ctx.editor.reshape(whole, (*shape(half)[:-1], size))
    return ctx.editor.call(aten.cat.default, [half, half], len(shape(half)) - 1)
