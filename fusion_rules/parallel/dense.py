"""y = act(x Wgᵀ, x Wuᵀ) Wdᵀ  →  reduce_scatter(act(X Wg[r]ᵀ, X Wu[r]ᵀ) Wd[:, r]ᵀ),  X = all_gather(x), over dense_tp.

Each rank has tokens of its own and columns r of the intermediate width. Ranks that have the same tokens (attn_tp
without sp) do not gather, and add by all_reduce. Shared experts of mixtures stay whole.
"""

from __future__ import annotations

from torch import fx

from cannopy.fusion_rules.parallel.narrow import Narrow
from cannopy.fusion_rules.parallel.places import mlps, operands
from cannopy.fusion_rules.parallel.shards import Part
from cannopy.fusion_rules.parallel.tokens import Rows, error, rows_at
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, shape

KIND = "dense_tp"


def cut(work: Work) -> int:
    """Cut every dense MLP; the number of them. Raises `ParallelError` where one cannot be cut."""
    rows = rows_at(work, KIND)
    part = Part(work.layout.position(KIND), work.layout.size(KIND))
    found = mlps(work.program, work.editor)
    for node in found.lost:
        raise error(work.layout, KIND, node, "this activation of a projection belongs to no MLP that can be cut")
    for down in found.dense:
        _cut(work, rows(down), part, down)
    return len(found.dense)


def _cut(work: Work, rows: Rows, part: Part, down: fx.Node) -> None:
    editor, narrow = work.editor, Narrow(work, KIND, rows)
    x, weight, bias = operands(down)
    columns = part.of(shape(x)[-1], f"{KIND}: the intermediate width of an MLP", down)
    inner = narrow.of(x, -1, [columns])
    narrow.check(down)
    with editor.before(down):
        partial = editor.call(aten.linear.default, inner, narrow.weight(weight, 1, [columns]))
        editor.replace(down, rows.summed(partial, bias))
