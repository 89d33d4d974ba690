"""The low-rank chains of MLA in front of sparse attention over the tokens' own rows  →  npu_mla_prolog_v3, layout TND.

    q_c = rms(x W_DQ) γ_q;  q = q_c W_UQ;  query = q_nope W_UK;  query_rope = rope(q_pe)
    c, r = x W_DKV;  latent rows = rms(c) γ_kv;  rotated rows = rope(r)

Prompts attend to what this call computes, and caches take the same rows at slots of the caller's. So the operator
writes rows in order, into tensors made for that; what writes the caches stays as it is.
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.rewrite import mla_chain
from cannopy.fusion_rules.rewrite.mla_chain import Chain, sizes, sparse
from cannopy.fx_passes.graph import aten, dtype, shape

MODE = "TND"
PATTERN = sparse(MODE)


def _rows(match: Match) -> list[tuple[list[int], torch.dtype]]:
    """Shape and dtype of the latent and the rotated rows [T, 1, ·]."""
    batch, _, queries, _ = sizes(match)
    return [([batch * queries, 1, shape(match[name])[-1]], dtype(match[name])) for name in ("latents", "ropes")]


def check(match: Match, ctx: Context) -> Refusal | None:
    """Both chains read one input, the keys are their rows, sizes and dtypes are in the contract."""
    found = mla_chain.chain(match, match["latents"], match["ropes"])
    if isinstance(found, Refusal):
        return found
    rows = [ctx.editor.empty(size, kind) for size, kind in _rows(match)]
    return mla_chain.computed(match, ctx, found) or mla_chain.not_legal(match, ctx, found, rows, MODE)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op; everything that reads the rows reads its rows."""
    found = mla_chain.chain(match, match["latents"], match["ropes"])
    assert isinstance(found, Chain)
    device = found.x.meta["val"].device
    empty = [ctx.editor.call(aten.full.default, size, 0, dtype=kind, device=device) for size, kind in _rows(match)]
    old: tuple[fx.Node, fx.Node] = (found.norms[1], found.key.node)
    for node, rows in zip(old, mla_chain.emit(match, ctx, found, empty, MODE), strict=True):
        ctx.editor.replace(node, ctx.editor.reshape(rows, shape(node)))


RULE = Rule(
    name="mla_prolog",
    equation="rms(x W_DQ) W_UQ (W_UK | rope), rms(x W_DKV) | rope  →  mla_prolog_v3(x), rows for caches",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_mla_prolog_v3",
    near=4,
)
