"""Indexer and attention over latents of packed tokens  →  lightning indexer + sparse attention, layout TND.

    topk(mask(Σ_h w_h · relu(q_h · k)))                    →  npu_lightning_indexer
    softmax(mask(q · [W_UK c; r]ᵀ)) · (W_UV c)             →  npu_sparse_flash_attention(q W_UK, c, r) · W_UV

    a step's tokens and a cache    →  keys are blocks of the cache, by the model's block table (PA_BSND)
    prompts one behind the other   →  keys are the prompts' own rows (TND)

Where elements come from is compared as strided views, so heads may stand before or behind the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Literal, Number, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, RESHAPE, computed_weight, wrong_shape
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.rewrite import latent_attention, lightning_indexer, positions
from cannopy.fusion_rules.rewrite.attention_operands import SWAP, Cache, cached, unseen, without_keys
from cannopy.fusion_rules.rewrite.latent_attention import Latent
from cannopy.fusion_rules.rewrite.lightning_indexer import marked, widened
from cannopy.fx_passes.affine import Causal, causal
from cannopy.fx_passes.graph import aten, dtype, shape
from cannopy.fx_passes.packed import Packed, packed
from cannopy.fx_passes.strides import View, view
from cannopy.fx_passes.weight_plan import derived, why_not_weight

INDEX_KEYS = Through(op(aten.permute.default, widened(Any("index_key")), Literal([0, 2, 1])), over=(*CAST, *RESHAPE))
MARKED = marked(INDEX_KEYS, True)
PICKED = Alt((
    Through(MARKED, over=RESHAPE),
    op(aten.bitwise_not.default, Through(marked(INDEX_KEYS, False), over=RESHAPE)),
))
PATTERN = op(
    "cannopy::attention",
    Alt((op(aten.mul.Tensor, Any("q"), Number("q_scale"), commutative=True), Any("q"))),
    Any("k"),
    Any("v"),
    Through(op(aten.bitwise_and.Tensor, Any("attention_mask"), PICKED, commutative=True, name="both"), over=RESHAPE,
            name="mask"),
    Number("scale"),
    Literal(False),
    Any("enable_gqa"),
    rest=True,
)


@dataclass(frozen=True)
class Keys:
    """What the operators read: blocks of ``block`` rows of caches, by a block table, or packed rows (``block`` 0).

    ``latent``, ``rope`` and ``index`` hold the rows in order; ``cache`` is that of the latents.
    """

    latent: fx.Node
    rope: fx.Node
    index: fx.Node
    cache: Cache | None
    block: int

    @property
    def layout(self) -> str:
        """Of the keys, as both operators name it."""
        return "PA_BSND" if self.block else "TND"

    def size(self, node: fx.Node, width: int) -> list[int]:
        """The shape in which the operators take ``node``, one of the three."""
        count = math.prod(shape(node)) // width
        return [count // self.block, self.block, 1, width] if self.block else [count, 1, width]


def _sizes(match: Match) -> tuple[int, int, int, int]:
    """B, N, S and L."""
    batch, heads, queries, _ = shape(match["q"])
    return batch, heads, queries, shape(match["k"])[2]


def _scale(match: Match) -> float:
    """The factor of the scores; one on the queries is part of it."""
    return float(match["scale"]) * float(match.get("q_scale", 1.0))


def _visible(match: Match) -> Causal | Packed | Refusal:
    """What the mask of the attention and that of the indexer show, one and the same."""
    batch, _, queries, length = _sizes(match)
    refusal = lightning_indexer.wrong_mask(match)
    if refusal is not None:
        return refusal
    if _four(match["mask"]) != (batch, 1, queries, length):
        return wrong_shape("the mask of the attention", match["mask"], str([batch, 1, queries, length]))
    if _four(match["both"]) not in ((1, batch, queries, length), (batch, 1, queries, length)):
        return wrong_shape("the mask", match["both"], str([batch, queries, length]))
    found = [_shown(match, name, queries, length) for name in ("attention_mask", "index_mask")]
    for one in found:
        if isinstance(one, Refusal):
            return one
    if found[0] != found[1]:
        return Refusal("the indexer and the attention use different masks", match["attention_mask"], "mask",
                       "one causal mask for both", "two masks", "give the indexer the mask of the attention")
    return found[0]


def _four(mask: fx.Node) -> tuple[int, ...]:
    """The shape of a mask as it broadcasts to [B, N, S, L]."""
    return (1,) * (4 - len(shape(mask))) + shape(mask)


def _shown(match: Match, name: str, queries: int, length: int) -> Causal | Packed | Refusal:
    mask, batch = match[name], _sizes(match)[0]
    prompts = packed(mask, queries) if queries == length and batch == 1 else None
    if prompts is not None:
        return prompts
    past = causal(mask, queries, length)
    if isinstance(past, str):
        return Refusal(past, mask, "mask", "a mask that is causal by position", describe(mask),
                       "leave the causal mask to the model: no padding, sliding window or other mask on top")
    by_request = past.by_request and len(shape(mask)) == 3
    refusal = None if by_request else unseen(past, mask, queries, length)
    return refusal or without_keys(past, match.anchor) or past


def _keys(match: Match, ctx: Context, found: Latent, seen: Causal | Packed) -> Keys | Refusal:
    _, _, queries, length = _sizes(match)
    rows = view(match["index_key"])
    index = cached(rows)
    if isinstance(seen, Causal) and found.caches is not None and index is not None:
        latent, rope = found.caches
        if (index.table, index.block) != (latent.table, latent.block):
            return Refusal("the keys of the indexer stand in other blocks than the latents", match["index_key"],
                           "cache", "one block table for both caches", describe(match["index_key"]),
                           "read both caches by the block table of the requests")
        block = latent.block or positions.block_size(length, ctx.block_size)
        if isinstance(block, str):
            return positions.block_refusal(block, latent.new, length)
        return Keys(latent.new, rope.new, index.new, latent, block)
    if isinstance(seen, Causal) and (seen.symbol is not None or seen.const + queries != length):
        return Refusal("the latents and the keys of the indexer are not both rows of caches, and the last query does "
                       "not see the last of them", match["index_key"], "cache",
                       "caches that are written in this step, or keys of this step's tokens",
                       describe(match["index_key"]), "write latents, rotated keys and keys of the indexer alike")
    for name, one in (("latents", found.latent), ("rotated keys", found.rope), ("keys of the indexer", rows)):
        if one != View.whole(one.source).reshape(one.size):
            return Refusal(f"the {name} are not the rows of one value in order", one.source, "operand",
                           "one row per key", describe(one.source), "attend to the rows that the cache is written with")
    return Keys(found.latent.source, found.rope.source, rows.source, None, 0)


def check(match: Match, ctx: Context) -> Refusal | None:
    """Latent operands, one proven mask, positive scales, legal sizes and dtypes."""
    found = _operands(match)
    if isinstance(found, Refusal):
        return found
    batch, _, queries, length = _sizes(match)
    index_key = (batch, length, shape(match["index_query"])[-1])
    refusal = lightning_indexer.wrong_layout(match, batch, queries, length, index_key)
    seen = refusal or _visible(match)
    if isinstance(seen, Refusal):
        return seen
    refusal = lightning_indexer.not_positive(match)
    keys = refusal or _keys(match, ctx, found, seen)
    if isinstance(keys, Refusal):
        return keys
    reason = why_not_weight(ctx.program, found.kv_b)
    if reason is not None:
        return computed_weight("kv_b_proj", found.kv_b, reason)
    return _indexer_illegal(match, ctx, keys, seen) or _attention_illegal(match, ctx, found, keys, seen)


def _operands(match: Match) -> Latent | Refusal:
    if any(len(shape(match[name])) != 4 for name in ("q", "k", "v")) or shape(match["q"])[0] != shape(match["k"])[0]:
        return wrong_shape("the queries", match["q"], "[B, N, S, D], keys and values [B, N, L, D]")
    found = latent_attention.latent(match)
    return found or Refusal("keys and values do not come from one latent", match["k"], "operand",
                            "keys [W_UK c | rotated part] and values W_UV c", describe(match["k"]),
                            "expand keys and values from the latents by one projection, as DeepSeek does")


def _positions(match: Match, ctx: Context, keys: Keys, seen: Causal | Packed) -> dict[str, torch.Tensor | None]:
    batch, _, _, length = _sizes(match)
    count = math.prod(shape(seen.ends)) + 1 if isinstance(seen, Packed) else batch
    lengths = ctx.editor.empty([count], torch.int32)
    table = ctx.editor.empty([batch, length // keys.block], torch.int32) if keys.block else None
    return {"block_table": table, "actual_seq_lengths_query": lengths, "actual_seq_lengths_kv": lengths}


def _indexer_attributes(match: Match, keys: Keys) -> dict[str, Anything]:
    return {"layout_query": "TND", "layout_key": keys.layout, "sparse_count": int(match["count"]), "sparse_mode": 3}


def _attention_attributes(keys: Keys) -> dict[str, Anything]:
    return {"sparse_block_size": 1, "layout_query": "TND", "layout_kv": keys.layout, "sparse_mode": 3,
            "attention_mode": 2}


def _indexer_illegal(match: Match, ctx: Context, keys: Keys, seen: Causal | Packed) -> Refusal | None:
    batch, _, queries, _ = _sizes(match)
    tokens, (heads, dim), empty = batch * queries, shape(match["index_query"])[-2:], ctx.editor.empty
    args = (empty([tokens, heads, dim], dtype(match["index_query"])),
            empty(keys.size(keys.index, dim), dtype(match["index_key"])),
            empty([tokens, heads], dtype(match["head_weight"])))
    kwargs: dict[str, Anything] = {**_positions(match, ctx, keys, seen), **_indexer_attributes(match, keys)}
    kwargs["actual_seq_lengths_key"] = kwargs.pop("actual_seq_lengths_kv")
    given = {"query": match["index_query"], "key": match["index_key"], "weights": match["head_weight"]}
    return illegal("npu_lightning_indexer", args, kwargs, match["topk"], ctx, given)


def _attention_illegal(match: Match, ctx: Context, found: Latent, keys: Keys, seen: Causal | Packed) -> Refusal | None:
    batch, heads, queries, _ = _sizes(match)
    tokens, rope, empty = batch * queries, found.rope.size[2], ctx.editor.empty
    latent = empty(keys.size(keys.latent, found.rank), dtype(keys.latent))
    args = (empty([tokens, heads, found.rank], dtype(match["q"])), latent, latent,
            empty([tokens, 1, int(match["count"])], torch.int32), _scale(match))
    kwargs = _positions(match, ctx, keys, seen) | _attention_attributes(keys) | {
        "query_rope": empty([tokens, heads, rope], dtype(match["q"])),
        "key_rope": empty(keys.size(keys.rope, rope), dtype(keys.rope)),
    }
    return illegal("npu_sparse_flash_attention", args, kwargs, match.anchor, ctx,
                   {"query": match["q"], "key": keys.latent, "key_rope": keys.rope})


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the indexer, the absorbed queries, the sparse attention and the value projection."""
    batch, heads, queries, _ = _sizes(match)
    found, seen = _operands(match), _visible(match)
    assert isinstance(found, Latent)
    assert not isinstance(seen, Refusal)
    keys = _keys(match, ctx, found, seen)
    assert isinstance(keys, Keys)
    where = _emit_positions(match, ctx, keys, seen)
    attended = _emit_attention(match, ctx, found, keys, where)
    values = latent_attention.values(match, ctx, found, attended, heads_first=False)
    values = ctx.editor.reshape(values, [batch, queries, heads, found.value])
    ctx.editor.replace(match.anchor, ctx.editor.call(aten.permute.default, values, SWAP))


def _emit_positions(match: Match, ctx: Context, keys: Keys, seen: Causal | Packed) -> dict[str, fx.Node | None]:
    batch, _, queries, length = _sizes(match)
    if keys.cache is not None:
        assert isinstance(seen, Causal)
        ends = positions.query_ends(ctx, batch, queries)
        lengths = positions.key_lengths(ctx, seen, batch, queries)
        table = latent_attention.table_of(ctx, keys.cache, batch, length, keys.block)
        return {"block_table": table, "actual_seq_lengths_query": ends, "actual_seq_lengths_kv": lengths}
    if isinstance(seen, Packed):
        ends = lengths = positions.prompt_ends(ctx, seen, queries, torch.int32)
    else:
        ends, lengths = (positions.query_ends(ctx, batch, n) for n in (queries, length))
    return {"actual_seq_lengths_query": ends, "actual_seq_lengths_kv": lengths}


def _emit_attention(match: Match, ctx: Context, found: Latent, keys: Keys, at: dict[str, fx.Node | None]) -> fx.Node:
    batch, heads, queries, _ = _sizes(match)
    tokens, rope, width = batch * queries, found.rope.size[2], found.nope + found.value
    call, reshape, (index_heads, dim) = ctx.editor.call, ctx.editor.reshape, shape(match["index_query"])[-2:]
    index_at = {("actual_seq_lengths_key" if k == "actual_seq_lengths_kv" else k): v for k, v in at.items()}
    chosen = call(
        torch.ops.npu.npu_lightning_indexer.default, reshape(match["index_query"], [tokens, index_heads, dim]),
        reshape(keys.index, keys.size(keys.index, dim)), reshape(match["head_weight"], [tokens, index_heads]),
        **index_at, **_indexer_attributes(match, keys),
    )
    w_uk = derived(ctx.program, ctx.editor, "w_uk", [found.kv_b],
                   f"w[0].reshape({heads}, {width}, {found.rank})[:, :{found.nope}]")
    absorbed = call(aten.permute.default, call(aten.matmul.default, found.query.emit(ctx, 0), w_uk), SWAP)
    turned = call(aten.permute.default, found.query.emit(ctx, 1), SWAP)
    latent = reshape(keys.latent, keys.size(keys.latent, found.rank))
    out = call(
        torch.ops.npu.npu_sparse_flash_attention.default, reshape(absorbed, [tokens, heads, found.rank]), latent,
        latent, ctx.editor.item(chosen, 0), _scale(match), **at,
        query_rope=reshape(turned, [tokens, heads, rope]), key_rope=reshape(keys.rope, keys.size(keys.rope, rope)),
        **_attention_attributes(keys),
    )
    return ctx.editor.item(out, 0)


RULE = Rule(
    name="sparse_flash_attention",
    equation=(
        "softmax(topk_mask(q [W_UK c; r]ᵀ)) (W_UV c), packed tokens  →  "
        "lightning_indexer + sparse_flash_attention(q W_UK, c, r) W_UV"
    ),
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_sparse_flash_attention",
    near=6,
    core=MARKED,
)
