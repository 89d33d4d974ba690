"""slice(x, d, 0, a), slice(x, d, a, b), …, slice(x, d, z, size)  →  one split_with_sizes(x, [a, b - a, …], d).

One SplitV kernel in the place of several StridedSlice. Runs late: rules match slices.
"""

from __future__ import annotations

from typing import cast

from torch import fx

from cannopy.fx_passes.graph import Editor, aten, is_call, shape
from cannopy.fx_passes.normalise.slices import bounds
from cannopy.fx_passes.program import Program

Range = tuple[int, int]


def run(program: Program) -> int:
    """Merge slices that together are the whole of a dim; the number of slices replaced."""
    editor = Editor(program.gm)
    families: dict[tuple[fx.Node, int], dict[Range, list[fx.Node]]] = {}
    for node in editor.graph.nodes:
        if is_call(node, aten.slice.Tensor):
            dim, start, end, step = bounds(node)
            if step == 1 and start < end:
                same = families.setdefault((cast(fx.Node, node.args[0]), dim), {})
                same.setdefault((start, end), []).append(node)
    order = {node: i for i, node in enumerate(editor.graph.nodes)}
    changes = 0
    for (source, dim), slices in families.items():
        chain = _partition(set(slices), shape(source)[dim])
        if len(chain) > 1:
            changes += _merge(editor, source, dim, [slices[part] for part in chain], order)
    editor.sweep()
    return changes


def _partition(ranges: set[Range], size: int) -> list[Range]:
    """The ranges that lie end to end from 0 to ``size``, as many as possible; none when there is a gap."""
    best: dict[int, list[Range]] = {size: []}
    for start in sorted({s for s, _ in ranges}, reverse=True):
        tails = [[(s, e), *best[e]] for s, e in ranges if s == start and e in best]
        if tails:
            best[start] = max(tails, key=len)
    return best.get(0, [])


def _merge(editor: Editor, source: fx.Node, dim: int, parts: list[list[fx.Node]], order: dict[fx.Node, int]) -> int:
    replaced = [node for part in parts for node in part]
    with editor.before(min(replaced, key=order.__getitem__)):
        sizes = [shape(part[0])[dim] for part in parts]
        split = editor.call(aten.split_with_sizes.default, source, sizes, dim)
        for index, part in enumerate(parts):
            for node in part:
                with editor.provenance_of(node):
                    editor.replace(node, editor.item(split, index))
    return len(replaced)
