"""The low-rank chains of MLA in front of attention over latents in caches  →  npu_mla_prolog_v3.

    q_c = rms(x W_DQ) γ_q;  q = q_c W_UQ;  query = q_nope W_UK;  query_rope = rope(q_pe)
    c, r = x W_DKV;  latent cache[slot] = rms(c) γ_kv;  rope cache[slot] = rope(r)

It matches upwards from the fused attention in its absorbed form, or from the sparse one over blocks of caches. The
caches may be static or paged. They become graph inputs in block form and are updated in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Literal, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION
from cannopy.fusion_rules.rewrite import mla_chain, positions
from cannopy.fusion_rules.rewrite.mla_chain import ABSORBED, Chain, behind, chain_refusal, sizes, sparse
from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import aten, is_call, shape

MODE = "PA_BSND"
PATTERN = Alt((
    op(f"air::{FUSED_INFER_ATTENTION}", ABSORBED, Any("latents"), Any("latents"), rest=True, query_rope=Any("q_rope"),
       key_rope=Any("ropes"), input_layout=Literal("TND_NTD")),
    sparse(MODE),
))


@dataclass(frozen=True)
class Written:
    """A cache input of the graph and its write: ``index`` has a slot per token, or a position per query of each
    request."""

    cache: fx.Node
    new: fx.Node
    index: fx.Node
    value: fx.Node


@dataclass(frozen=True)
class Found:
    """The chains and the writes of latents and rotated parts."""

    chain: Chain
    latent: Written
    rope: Written


def _found(match: Match) -> Found | Refusal:
    batch, _, queries, _ = sizes(match)
    latent, rope = (_written(match[name], batch * queries, queries) for name in ("latents", "ropes"))
    if latent is None or rope is None or latent.index is not rope.index:
        return chain_refusal(match["latents"], "both caches are not written once, at the same places, for all tokens")
    chain = mla_chain.chain(match, latent.value, rope.value)
    return chain if isinstance(chain, Refusal) else Found(chain, latent, rope)


def _written(node: fx.Node, tokens: int, queries: int) -> Written | None:
    new = behind(node)
    if not is_call(new, aten.index_copy.default):
        return None
    base, dim, index, value = cast("tuple[fx.Node, int, fx.Node, fx.Node]", cast(fx.Node, new).args)
    size = shape(cast(fx.Node, new))
    dim %= len(size)
    lead = math.prod(size[:dim])
    if shape(index) != (tokens // lead if lead else 0,) or (lead != 1 and shape(index) != (queries,)):
        return None
    cache = behind(base)
    return Written(cache, cast(fx.Node, new), index, value) if isinstance(cache, fx.Node) else None


def check(match: Match, ctx: Context) -> Refusal | None:
    """Both chains read one input, the caches are graph inputs written back, sizes and dtypes are in the contract."""
    found = _found(match)
    if isinstance(found, Refusal):
        return found
    for name, written in (("latent", found.latent), ("rope", found.rope)):
        reason = rebind.why_not(ctx.program, written.cache, _blocks(match, written))
        if reason is None and rebind.write_of(written.cache) is None:
            reason = f"{written.cache.name} is not written back"
        if reason is not None:
            return Refusal(f"{name} cache: {reason}", written.new, "cache",
                           "a cache that is a graph input, written once and read after that", reason,
                           "pass a cache and write it once per call, before the attention reads it")
    batch, _, queries, _ = sizes(match)
    caches = [ctx.editor.empty(_blocks(match, w), w.cache.meta["val"].dtype) for w in (found.latent, found.rope)]
    index = ctx.editor.empty([batch * queries], torch.int64)
    given = {"kv_cache": found.latent.cache, "kr_cache": found.rope.cache}
    return mla_chain.computed(match, ctx, found.chain) or mla_chain.not_legal(match, ctx, found.chain, caches, MODE,
                                                                              index, given)


def _blocks(match: Match, written: Written) -> list[int]:
    block, width = shape(match["latents"])[1], shape(written.value)[-1]
    return [math.prod(shape(written.new)) // width // block, block, 1, width]


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op and let the attention read its queries and caches."""
    found = _found(match)
    assert isinstance(found, Found)
    both = (found.latent, found.rope)
    for written in both:
        rebind.rebind(ctx.program, ctx.editor, written.cache, _blocks(match, written))
    new = mla_chain.emit(match, ctx, found.chain, [w.cache for w in both], MODE, _slots(match, ctx, found))
    for written, value in zip(both, new, strict=True):
        rebind.update(ctx.editor, written.cache, written.new, value)


def _slots(match: Match, ctx: Context, found: Found) -> fx.Node:
    batch, _, queries, _ = sizes(match)
    index = found.latent.index
    if shape(index) != (batch * queries,):
        rows = math.prod(shape(found.latent.new)) // shape(match["latents"])[-1]
        return positions.slots(ctx, index, batch, rows // batch)
    return index if index.meta["val"].dtype == torch.int64 else ctx.editor.call(
        aten._to_copy.default, index, dtype=torch.int64)


RULE = Rule(
    name="mla_prolog",
    equation="rms(x W_DQ) W_UQ (W_UK | rope), cache[slot] = rms(x W_DKV) | rope  →  mla_prolog_v3(x, caches, slot)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_mla_prolog_v3",
    near=4,
)
