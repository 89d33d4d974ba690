"""empty, new_empty, empty_like, empty_strided  →  zeros: the host engine and a cached graph want known contents."""

from __future__ import annotations

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program

EMPTIES = (
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
)


def run(program: Program, editor: Editor) -> int:
    """Replace every allocation."""
    found = [n for n in editor.graph.nodes if is_call(n, *EMPTIES)]
    for node in found:
        device = node.meta["val"].device
        zero = 0.0 if dtype(node).is_floating_point else 0
        with editor.before(node):
            full = editor.call(aten.full.default, list(shape(node)), zero, dtype=dtype(node), device=device)
            editor.replace(node, full)
    return len(found)
