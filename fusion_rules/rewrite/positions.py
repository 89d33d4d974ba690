"""Lengths, slots and block tables that the paged ops want, from what the graph already computes.

B requests of S query tokens each are packed to T = B * S tokens. The caches of all requests lie behind each other, so
that block b of request r is block ``r * L / block + b`` (block table = identity).
"""

from __future__ import annotations

import math

import torch
from torch import fx

from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fx_passes.affine import Causal
from cannopy.fx_passes.graph import aten, dtype, shape
from cannopy.fx_passes.packed import Packed
from cannopy.fx_passes.weight_plan import derived

DEFAULT_BLOCK = 128
BLOCK_STEP, BLOCK_MAX = 16, 1024  # op-plugin docs of npu_mla_prolog_v3 and npu_sparse_flash_attention


def block_size(length: int, wanted: int | None = None) -> int | str:
    """Rows per cache block for a cache of ``length`` rows per request, or the reason why there is none.

    128 (what expert models use) when it divides the length, else the largest smaller multiple of 16 that does.
    """
    if wanted is not None:
        legal = wanted % BLOCK_STEP == 0 and BLOCK_STEP <= wanted <= BLOCK_MAX and length % wanted == 0
        return wanted if legal else (
            f"block_size {wanted} is not a multiple of {BLOCK_STEP} up to {BLOCK_MAX} that divides the cache "
            f"length {length}"
        )
    for size in range(DEFAULT_BLOCK, 0, -BLOCK_STEP):
        if length % size == 0:
            return size
    return (f"cache length {length} is not a multiple of {BLOCK_STEP}, so the cache cannot be seen as blocks; "
            f"make max_cache_len a multiple of {DEFAULT_BLOCK}")


def block_refusal(reason: str, cache: fx.Node, length: int) -> Refusal:
    """`block_size` found no block for a cache of ``length`` rows."""
    return Refusal(reason, cache, "cache", "a cache length that blocks divide", f"{length} rows",
                   f"make max_cache_len a multiple of {DEFAULT_BLOCK}")


def key_lengths(
    ctx: Context, past: Causal, batch: int, queries: int, kind: torch.dtype = torch.int32
) -> fx.Node:
    """[B] of dtype ``kind``: keys visible to the last query of each request, ``past + S``."""
    call = ctx.editor.call
    if past.symbol is None:
        return call(aten.full.default, [batch], past.const + queries, dtype=kind, device=_device(ctx))
    length = ctx.editor.reshape(past.symbol, [batch if past.by_request else 1])
    if past.const + queries:
        length = call(aten.add.Tensor, length, past.const + queries)
    if dtype(length) != kind:
        length = call(aten._to_copy.default, length, dtype=kind)
    return ctx.editor.expand(length, [batch])


def query_ends(ctx: Context, batch: int, queries: int, kind: torch.dtype = torch.int32) -> fx.Node:
    """[B] of dtype ``kind``: cumulative numbers of query tokens (layout TND)."""
    return ctx.editor.call(
        aten.arange.start_step, queries, batch * queries + 1, queries, dtype=kind, device=_device(ctx)
    )


def block_table(ctx: Context, batch: int, length: int, block: int) -> fx.Node:
    """int32 [B, L / block]: the identity."""
    flat = ctx.editor.call(aten.arange.default, batch * length // block, dtype=torch.int32, device=_device(ctx))
    return ctx.editor.reshape(flat, [batch, length // block])


def packed_ends(
    ctx: Context, seen: Causal | Packed | None, batch: int, queries: int, keys: int
) -> tuple[fx.Node, fx.Node]:
    """int64 running sums of the queries and of the keys of each request, for B · S packed queries and B · T keys.

    The operator wants sums that end at the number of rows, and the last query of a request to see its last key. Where
    rows of a cache lie behind that key, they form a request of their own, which has no query.
    """
    call, device = ctx.editor.call, _device(ctx)
    if isinstance(seen, Packed):
        both = prompt_ends(ctx, seen, queries)
        return both, both
    if seen is None:
        return tuple(query_ends(ctx, batch, n, torch.int64) for n in (queries, keys))  # type: ignore[return-value]
    starts = call(aten.arange.start_step, 0, batch * keys, keys, dtype=torch.int64, device=device)
    used = call(aten.add.Tensor, starts, key_lengths(ctx, seen, batch, queries, torch.int64))
    ends = call(aten.cat.default, [ctx.editor.reshape(x, [batch, 1]) for x in (used, query_ends(
        ctx, batch, keys, torch.int64))], 1)
    twice = ctx.editor.expand(ctx.editor.reshape(query_ends(ctx, batch, queries, torch.int64), [batch, 1]), [batch, 2])
    return tuple(ctx.editor.reshape(x, [2 * batch]) for x in (twice, ends))  # type: ignore[return-value]


def prompt_ends(ctx: Context, seen: Packed, tokens: int, kind: torch.dtype = torch.int64) -> fx.Node:
    """[R + 1] of dtype ``kind``: where prompts end in ``tokens`` packed ones; those behind the last are one more."""
    call = ctx.editor.call
    ends = call(aten.add.Tensor, seen.ends, -seen.shift) if seen.shift else seen.ends
    ends = call(aten.clamp.default, ctx.editor.reshape(ends, [math.prod(shape(ends))]), 0, tokens)
    ends = ends if dtype(ends) == kind else call(aten._to_copy.default, ends, dtype=kind)
    last = call(aten.full.default, [1], tokens, dtype=kind, device=_device(ctx))
    return call(aten.cat.default, [ctx.editor.item(call(aten.sort.default, ends), 0), last], 0)


def causal_mask(ctx: Context) -> fx.Node:
    """bool [2048, 2048]: what sparse_mode 3 of the fused attention wants, once for the whole graph."""
    return derived(ctx.program, ctx.editor, "causal_mask", [], "torch.ones(2048, 2048, dtype=torch.bool).triu(1)")


def slots(ctx: Context, index: fx.Node, batch: int, length: int) -> fx.Node:
    """int64 [T]: the cache row of each token, from the position ``index`` [S] that all requests share."""
    if batch == 1:
        return index
    call = ctx.editor.call
    starts = call(aten.arange.start_step, 0, batch * length, length, dtype=torch.int64, device=_device(ctx))
    rows = call(aten.add.Tensor, ctx.editor.reshape(starts, [batch, 1]), ctx.editor.reshape(index, [1, *shape(index)]))
    return ctx.editor.reshape(rows, [batch * shape(index)[0]])


def _device(ctx: Context) -> torch.device:
    node = next(n for n in ctx.editor.graph.nodes if n.op == "placeholder")
    found: torch.device = node.meta["val"].device
    return found
