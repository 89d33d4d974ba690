"""y = a Woᵀ  →  reduce_scatter(all_to_all(a) Wo[:, r]ᵀ) over o_proj_tp: heads are exchanged for tokens.

``a`` [T, N·V] is what attention gives for this rank's tokens; behind the exchange a rank has columns r for the tokens
of all ranks of the group.
"""

from __future__ import annotations

import math

from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_to_all, reduce_scatter
from cannopy.fusion_rules.parallel.narrow import Narrow
from cannopy.fusion_rules.parallel.places import operands, projections_of_attention, without_projection
from cannopy.fusion_rules.parallel.shards import Part
from cannopy.fusion_rules.parallel.tokens import error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, shape
from cannopy.fx_passes.parallel import Group, ParallelError

KIND = "o_proj_tp"


def cut(work: Work) -> int:
    """Cut every output projection of attention; the number of them. Raises `ParallelError` where one cannot be cut."""
    layout = work.layout
    if layout.size("attn_tp") > 1:
        raise ParallelError(f"{KIND}={layout.size(KIND)} with attn_tp={layout.size('attn_tp')}: attn_tp cuts the "
                            f"output projections already, by heads; leave {KIND} out")
    group, part = layout.group(KIND), Part(layout.position(KIND), layout.size(KIND))
    found = projections_of_attention(work.program, work.editor)
    for kernel in without_projection(work.editor, found):
        raise error(layout, KIND, kernel, "no projection with a parameter for its matrix reads this attention")
    for node in found:
        _cut(work, group, part, node)
    return len(found)


def _cut(work: Work, group: Group, part: Part, node: fx.Node) -> None:
    editor = work.editor
    x, weight, bias = operands(node)
    columns = part.of(shape(x)[-1], f"{KIND}: the columns of all heads", node)
    tokens, width = math.prod(shape(x)[:-1]), columns[1] - columns[0]
    with editor.before(node):
        apart = editor.call(aten.permute.default, editor.reshape(x, [tokens, group.size, width]), [1, 0, 2])
        swapped = all_to_all(editor, editor.reshape(apart, [group.size * tokens, width]), group)
        matrix = Narrow(work, KIND).weight(weight, 1, [columns])
        total = reduce_scatter(editor, editor.call(aten.linear.default, swapped, matrix), group)
        total = total if bias is None else editor.call(aten.add.Tensor, total, bias)
        editor.replace(node, editor.reshape(total, shape(node)))
