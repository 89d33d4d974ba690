"""Routed experts cut in width over moe_tp: every die has all experts, of each I / moe_tp columns.

    init_routing(x), grouped matmuls, finalize_routing(skip)  →
    reduce_scatter(finalize_routing(grouped matmuls of parts(init_routing(all_gather(x))))) + skip

Ranks that have the same tokens (attn_tp without sp) do not gather, and add by all_reduce. What is added to the sum of
the experts (a shared expert, the share of zero experts) is whole on each rank and added once.
"""

from __future__ import annotations

from cannopy.fusion_rules.parallel.mixtures import Mixture, mixtures, mlp
from cannopy.fusion_rules.parallel.shards import Part, take
from cannopy.fusion_rules.parallel.tokens import Rows, error, legal, rows_at
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fusion_rules.rewrite.expert_calls import DROPPED
from cannopy.fx_passes.graph import aten, shape
from cannopy.fx_passes.parallel import ParallelError

KIND = "moe_tp"


def cut(work: Work) -> int:
    """Cut every mixture; the number of them. Raises `ParallelError` where one cannot be cut."""
    layout = work.layout
    if layout.size("ep") > 1:
        raise ParallelError(f"{KIND}={layout.size(KIND)} with ep={layout.size('ep')}: experts are cut in width or "
                            "spread, not both; leave one of them out")
    rows, part = rows_at(work, KIND), Part(layout.position(KIND), layout.size(KIND))
    found = mixtures(work, KIND)
    for m in found:
        _cut(work, rows(m.end), part, m)
    return len(found)


def _cut(work: Work, rows: Rows, part: Part, m: Mixture) -> None:
    editor, (width, hidden) = work.editor, shape(m.weights[1])[1:]
    first, end = part.of(width, f"{KIND}: the width of an expert", m.init)
    gate_up = take(work.program, editor, m.weights[0], 2, [(first, end), (width + first, width + end)])
    weights = gate_up, take(work.program, editor, m.weights[1], 1, [(first, end)])
    tokens, top_k = shape(m.ids)[0] * rows.factor, shape(m.ids)[1]
    x, ids, scales = (rows.all(n, m.init) for n in (m.x, m.ids, m.scales))
    finalize, mode = m.end.target, m.end.kwargs.get("drop_pad_mode")
    if mode is None or len(m.init.args) > 2:
        raise error(work.layout, KIND, m.end, "the experts are not written as the fusion moe_experts writes them")
    with editor.before(m.end, like=m.init):
        sent = editor.call(m.init.target, x, ids, **{**m.init.kwargs, "active_num": tokens * top_k})
        out = mlp(work, m, editor.item(sent, 0), weights, editor.item(sent, 2))
        source = editor.item(sent, 1)
    with editor.before(m.end):
        if mode == DROPPED:
            out = editor.reshape(out, [top_k, tokens, hidden])
        partial = editor.call(finalize, out, None, None, None, scales, source, None, drop_pad_mode=mode)
        for node in (sent, partial):
            legal(work, KIND, node)
        total = rows.summed(partial)
        for node in m.added:
            total = editor.call(aten.add.Tensor, total, node)
        editor.replace(m.end, total)
