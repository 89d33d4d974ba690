"""Attention over keys and values that one projection expands from a shared latent (MLA): absorbed, or as it is.

    softmax(q · [W_UK c; r]ᵀ) · (W_UV c)  =  (softmax([q W_UK; q_rope] · [c; r]ᵀ) · c) · W_UV

The absorbed form attends to the latents c in the cache and expands nothing; the operator takes up to 16 queries per
request for it. Longer prompts keep their expanded keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.engine.spellings import computed_weight
from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION, torchair_op
from cannopy.fusion_rules.rewrite import positions
from cannopy.fusion_rules.rewrite.attention_operands import SWAP, Cache, Split, Visible, cached, rows, split
from cannopy.fx_passes.affine import Causal
from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.packed import Packed
from cannopy.fx_passes.strides import View, view
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

FEW = 16
"""Queries per request that the operator takes with latents (op-plugin doc of npu_fused_infer_attention_score_v2)."""


@dataclass(frozen=True)
class Latent:
    """The operands of a latent attention over [B, N, S, ·] queries and L keys.

    ``expanded`` is the product of kv_b, ``latent`` [B, L, rank] and ``rope`` [B, L, rope] what it and the keys come
    from; ``caches`` are those of both, where they are rows of caches.
    """

    query: Split
    key: Split
    expanded: fx.Node
    kv_b: fx.Node
    latent: View
    rope: View
    nope: int
    value: int
    caches: tuple[Cache, Cache] | None

    @property
    def rank(self) -> int:
        """Width of a latent."""
        return self.latent.size[2]


def latent(match: Match) -> Latent | None:
    """The operands where the keys and values of ``match`` come from one latent, else None."""
    query, key = split(match["q"]), split(match["k"])
    if query is None or key is None or shape(query.parts[0])[-1] != shape(key.parts[0])[-1]:
        return None
    batch, heads, length = shape(match["k"])[:3]
    if shape(match["q"])[1] != heads:
        return None
    value = view(match["v"])
    nope, nope_view, rope_view = shape(key.parts[0])[-1], key.view(0), key.view(1)
    expanded, width = value.source, nope + value.size[3]
    if nope_view is None or rope_view is None or not is_call(expanded, aten.linear.default) or len(expanded.args) != 2:
        return None
    steps = (length * heads * width, width, heads * width, 1)
    if nope_view.source is not expanded or math.prod(shape(expanded)) != batch * length * heads * width:
        return None
    if not nope_view.matches((batch, heads, length, nope), steps):
        return None
    if not value.matches((batch, heads, length, width - nope), steps, nope):
        return None
    below = cast(fx.Node, expanded.args[0])
    latents = view(below).reshape((batch, length, shape(below)[-1])) or View.whole(below).reshape(
        (batch, length, shape(below)[-1]))
    shared = _shared(rope_view, heads)
    if latents is None or shared is None:
        return None
    found = cached(latents), cached(shared)
    caches = None if found[0] is None or found[1] is None or not _together(*found) else found
    return Latent(query, key, expanded, cast(fx.Node, expanded.args[1]), latents, shared, nope, width - nope,
                  cast("tuple[Cache, Cache] | None", caches))


def _shared(rope: View, heads: int) -> View | None:
    """[B, L, rope] where all heads have the same."""
    batch, _, length, width = rope.size
    if rope.stride[1] != 0:
        return None
    step = rope.stride
    return View(rope.source, (batch, length, width), (step[0], step[2], step[3]), rope.offset)


def _together(a: Cache | None, b: Cache | None) -> bool:
    return a is not None and b is not None and a.table is b.table and a.block == b.block


def check(match: Match, ctx: Context, found: Latent, seen: Visible) -> Refusal | None:
    """The absorbed form is legal, or else the expanded one."""
    if absorbs(match, found, seen):
        return _check_absorbed(match, ctx, found)
    return _check_expanded(match, ctx, found, seen)


def absorbs(match: Match, found: Latent, seen: Visible) -> bool:
    """Whether the absorbed form is the one to take."""
    queries = shape(match["q"])[2]
    return found.caches is not None and queries <= FEW and (isinstance(seen, Causal) or (seen is None and queries == 1))


def _block(match: Match, ctx: Context, found: Latent) -> int | str:
    assert found.caches is not None
    return found.caches[0].block or positions.block_size(shape(match["k"])[2], ctx.block_size)


def _attributes(match: Match, heads: int, kv_heads: int, layout: str, causal: bool) -> dict[str, Any]:
    return {"num_query_heads": heads, "num_key_value_heads": kv_heads, "softmax_scale": float(match["scale"]),
            "input_layout": layout, "sparse_mode": 3 if causal else 0}


def _check_absorbed(match: Match, ctx: Context, found: Latent) -> Refusal | None:
    reason = why_not_weight(ctx.program, found.kv_b)
    if reason is not None:
        return computed_weight("kv_b_proj", found.kv_b, reason)
    block = _block(match, ctx, found)
    assert found.caches is not None
    if isinstance(block, str):
        return positions.block_refusal(block, found.caches[0].new, shape(match["k"])[2])
    batch, heads, queries = shape(match["q"])[:3]
    blocks = math.prod(shape(found.caches[0].new)) // found.rank // block
    empty, kind = ctx.editor.empty, dtype(found.caches[0].new)
    cache = empty([blocks, block, found.rank], kind)
    args = (empty([batch * queries, heads, found.rank], dtype(match["q"])), cache, cache)
    lengths = empty([batch], torch.int64)
    kwargs = _attributes(match, heads, 1, "TND_NTD", queries > 1) | {
        "query_rope": empty([batch * queries, heads, found.rope.size[2]], dtype(match["q"])),
        "key_rope": empty([blocks, block, found.rope.size[2]], dtype(found.caches[1].new)),
        "atten_mask": empty([2048, 2048], torch.bool) if queries > 1 else None,
        "actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "block_size": block,
        "block_table": empty([batch, shape(match["k"])[2] // block], torch.int32),
    }
    return illegal(FUSED_INFER_ATTENTION, args, kwargs, match.anchor, ctx)


def rewrite(match: Match, ctx: Context, found: Latent, seen: Visible) -> None:
    """Emit the form that `check` has found legal."""
    batch, heads, queries = shape(match["q"])[:3]
    absorbed = absorbs(match, found, seen)
    attended = _emit_absorbed(match, ctx, found, seen) if absorbed else _emit_expanded(match, ctx, found, seen)
    values = ctx.editor.reshape(attended, [batch, queries, heads, found.value])
    ctx.editor.replace(match.anchor, ctx.editor.call(aten.permute.default, values, SWAP))


def _emit_absorbed(match: Match, ctx: Context, found: Latent, seen: Visible) -> fx.Node:
    batch, heads, queries = shape(match["q"])[:3]
    length, width, block = shape(match["k"])[2], found.nope + found.value, _block(match, ctx, found)
    assert found.caches is not None
    assert isinstance(block, int)
    call, reshape = ctx.editor.call, ctx.editor.reshape
    w_uk = derived(ctx.program, ctx.editor, "w_uk", [found.kv_b],
                   f"w[0].reshape({heads}, {width}, {found.rank})[:, :{found.nope}]")
    nope = found.query.emit(ctx, 0)
    absorbed = call(aten.permute.default, call(aten.matmul.default, nope, w_uk), SWAP)
    rope = call(aten.permute.default, found.query.emit(ctx, 1), SWAP)
    past = seen if isinstance(seen, Causal) else Causal(None, length - queries)
    latents, ropes = (_blocks(ctx, cache.new, block, d) for cache, d in
                      zip(found.caches, (found.rank, found.rope.size[2]), strict=True))
    out = call(
        torchair_op(FUSED_INFER_ATTENTION), reshape(absorbed, [batch * queries, heads, found.rank]), latents, latents,
        query_rope=reshape(rope, [batch * queries, heads, found.rope.size[2]]), key_rope=ropes,
        atten_mask=positions.causal_mask(ctx) if queries > 1 else None,
        actual_seq_qlen=positions.query_ends(ctx, batch, queries, torch.int64),
        actual_seq_kvlen=positions.key_lengths(ctx, past, batch, queries, torch.int64),
        block_table=table_of(ctx, found.caches[0], batch, length, block), block_size=block,
        **_attributes(match, heads, 1, "TND_NTD", queries > 1),
    )
    return values(match, ctx, found, ctx.editor.item(out, 0))


def _blocks(ctx: Context, cache: fx.Node, block: int, width: int) -> fx.Node:
    return ctx.editor.reshape(cache, [math.prod(shape(cache)) // width // block, block, width])


def table_of(ctx: Context, cache: Cache, batch: int, length: int, block: int) -> fx.Node:
    """The block table, int32 [B, L / block]: the model's own, or one block behind the other."""
    if cache.table is None:
        return positions.block_table(ctx, batch, length, block)
    if dtype(cache.table) == torch.int32:
        return cache.table
    return ctx.editor.call(aten._to_copy.default, cache.table, dtype=torch.int32)


def values(match: Match, ctx: Context, found: Latent, attended: fx.Node, heads_first: bool = True) -> fx.Node:
    """[N, T, rank], or [T, N, rank] without ``heads_first``, times W_UV [N, rank, Dv]  →  [T, N, Dv]"""
    heads, width = shape(match["q"])[1], found.nope + found.value
    recipe = f"w[0].reshape({heads}, {width}, {found.rank})[:, {found.nope}:].transpose(1, 2)"
    order = [0, 1, 2] if heads_first else [1, 0, 2]
    perms = {"perm_x1": order, "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    fakes = attended.meta["val"], preview(ctx.editor, [found.kv_b], recipe)
    refused = illegal("npu_transpose_batchmatmul", fakes, perms, match.anchor, ctx)
    w_uv = derived(ctx.program, ctx.editor, "w_uv", [found.kv_b], recipe)
    if refused is None:
        return ctx.editor.call(torch.ops.npu.npu_transpose_batchmatmul.default, attended, w_uv, **perms)
    by_head = attended if heads_first else ctx.editor.call(aten.permute.default, attended, order)
    product = ctx.editor.call(aten.matmul.default, by_head, w_uv)
    return ctx.editor.call(aten.permute.default, product, [1, 0, 2])


def _check_expanded(match: Match, ctx: Context, found: Latent, seen: Visible) -> Refusal | None:
    batch, heads, queries = shape(match["q"])[:3]
    length, rope, empty, kind = shape(match["k"])[2], found.rope.size[2], ctx.editor.empty, dtype(match["q"])
    tokens, keys = batch * queries, batch * length
    count = math.prod(shape(seen.ends)) + 1 if isinstance(seen, Packed) else batch * (2 if seen else 1)
    lengths = empty([count], torch.int64)
    args = (empty([tokens, heads, found.nope], kind), empty([keys, heads, found.nope], dtype(match["k"])),
            empty([keys, heads, found.value], dtype(match["v"])))
    kwargs = _attributes(match, heads, heads, "TND", seen is not None) | {
        "query_rope": empty([tokens, heads, rope], kind), "key_rope": empty([keys, heads, rope], dtype(match["k"])),
        "atten_mask": empty([2048, 2048], torch.bool) if seen is not None else None,
        "actual_seq_qlen": lengths, "actual_seq_kvlen": lengths,
    }
    return illegal(FUSED_INFER_ATTENTION, args, kwargs, match.anchor, ctx)


def _emit_expanded(match: Match, ctx: Context, found: Latent, seen: Visible) -> fx.Node:
    batch, heads, queries = shape(match["q"])[:3]
    length, rope, width = shape(match["k"])[2], found.rope.size[2], found.nope + found.value
    editor = ctx.editor
    both = editor.reshape(found.expanded, [batch * length, heads, width])
    key, value = (editor.call(aten.slice.Tensor, both, 2, a, b, 1) for a, b in ((0, found.nope), (found.nope, width)))
    nope, turned = (rows(ctx, found.query.emit(ctx, part), found.query.view(part)) for part in (0, 1))
    query_ends, key_ends = positions.packed_ends(ctx, seen, batch, queries, length)
    out = editor.call(
        torchair_op(FUSED_INFER_ATTENTION), nope, key, value, query_rope=turned,
        key_rope=_each_head(ctx, found, [batch * length, heads, rope]),
        atten_mask=None if seen is None else positions.causal_mask(ctx),
        actual_seq_qlen=query_ends, actual_seq_kvlen=key_ends,
        **_attributes(match, heads, heads, "TND", seen is not None),
    )
    return editor.item(out, 0)


def _each_head(ctx: Context, found: Latent, size: list[int]) -> fx.Node:
    """The rotated part of the keys [B · L, N, rope], the same for all heads."""
    tokens, _, rope = size
    if found.rope == View.whole(found.rope.source).reshape(found.rope.size):
        one = ctx.editor.reshape(found.rope.source, [tokens, 1, rope])
        return ctx.editor.expand(one, size)
    return rows(ctx, found.key.emit(ctx, 1))
