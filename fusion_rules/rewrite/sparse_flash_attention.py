"""Indexer scores, top-k mask and attention over the expanded latent cache  →  lightning indexer + sparse attention.

    topk(mask(Σ_h w_h · relu(q_h · k)))                    →  npu_lightning_indexer
    softmax(mask(q · [W_UK c; r]ᵀ)) · (W_UV c)             →  npu_sparse_flash_attention(q W_UK, c, r) · W_UV

The latent cache c [B, L, 512] is attended directly (absorbed form): no expansion of the cache per step.
"""

from __future__ import annotations

import operator
from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, RESHAPE, SWAP_HEADS, computed_weight, wrong_shape
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.rewrite import lightning_indexer, positions
from cannopy.fusion_rules.rewrite.attention_operands import unseen, without_keys
from cannopy.fx_passes.affine import Causal, causal, very_negative
from cannopy.fx_passes.graph import aten, dtype, shape
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight


def _cache(name: str) -> Op:
    """The value of a cache after this step's write."""
    return op(aten.index_copy.default, Any(f"{name}_cache"), Number(f"{name}_dim"), Any(f"{name}_index"),
              Any(f"{name}_new"), name=name)


INDEX_KEYS = Through(op(aten.permute.default, _cache("index_key"), Literal([0, 2, 1])), over=(*CAST, *RESHAPE))


def _keys_and_values() -> tuple[Pattern, Pattern]:
    expanded = op(
        aten.permute.default,
        op(aten.reshape.default, op(aten.linear.default, Through(_cache("latent"), over=RESHAPE), Any("kv_b")), Any()),
        SWAP_HEADS,
        name="expanded",
    )
    rope = Through(_cache("rope"), over=(*RESHAPE, aten.expand.default), name="rope_keys")
    nope = op(aten.slice.Tensor, expanded, Literal(3), Literal(0), Number("nope"), Literal(1))
    keys = Alt(tuple(op(aten.cat.default, Items(parts), Literal(3)) for parts in ((nope, rope), (rope, nope))),
               name="rope_first")
    values = op(aten.slice.Tensor, expanded, Literal(3), Number("nope"), Number("end"), Literal(1))
    return keys, values


KEYS, VALUES = _keys_and_values()

MARKED = lightning_indexer.marked(INDEX_KEYS, False)
HIDDEN = Through(MARKED, over=RESHAPE)
MASK = Alt((
    op(aten.bitwise_and.Tensor, Any("attention_mask"), op(aten.bitwise_not.default, HIDDEN), commutative=True),
    op(aten.masked_fill.Scalar, Any("attention_mask"), HIDDEN, Any("fill", where=lambda value: (
        None if very_negative(value) else f"{value}, too small to hide a key"), wants="-inf")),
))

QUERIES = op(aten.cat.default, Items((Any("q_first"), Any("q_second"))), Literal(3))

PATTERN = op(
    "cannopy::attention",
    Alt((QUERIES, op(aten.mul.Tensor, QUERIES, Number("q_scale"), commutative=True))),
    KEYS,
    VALUES,
    MASK,
    Number("scale"),
    Literal(False),
    Literal(False),
    rest=True,
)


def _queries(match: Match) -> tuple[fx.Node, fx.Node]:
    """The parts of the queries that meet the latent cache and the rope cache: without position, rotated."""
    parts = (match["q_first"], match["q_second"])
    return (parts[1], parts[0]) if match["rope_first"] else parts


def _scale(match: Match) -> float:
    """The factor of the scores; one on the queries is part of it."""
    return float(match["scale"]) * float(match.get("q_scale", 1.0))


def sizes(match: Match) -> dict[str, int]:
    """B, N, S, nope, value dims and the cache length L, from the matched tensors."""
    batch, heads, queries, nope = shape(_queries(match)[0])
    return {"B": batch, "N": heads, "S": queries, "nope": nope, "value": shape(match.anchor)[-1],
            "L": shape(match["latent"])[2], "rank": shape(match["latent"])[3]}


def _masks(match: Match) -> Causal | Refusal:
    s, refusal = sizes(match), lightning_indexer.wrong_mask(match)
    if refusal is not None:
        return refusal
    found = [causal(match[name], s["S"], s["L"]) for name in ("attention_mask", "index_mask")]
    for reason, name in zip(found, ("attention_mask", "index_mask"), strict=True):
        if isinstance(reason, str):
            return Refusal(reason, match[name], "mask", "a mask that is causal by position", describe(match[name]),
                           "leave the causal mask to the model: no padding, sliding window or other mask on top")
    if found[0] != found[1]:
        return Refusal("the indexer and the attention use different masks", match["attention_mask"], "mask",
                       "one causal mask for both", "two masks", "give the indexer the mask of the attention")
    past = found[0]
    assert isinstance(past, Causal)
    return unseen(past, match["attention_mask"], s["S"], s["L"]) or without_keys(past, match.anchor) or past


def _layout(match: Match) -> Refusal | None:
    """Every tensor has the shape that the formula above needs."""
    s = sizes(match)
    batch, heads, queries, length = s["B"], s["N"], s["S"], s["L"]
    rope = shape(match["rope"])[3]
    wanted: list[tuple[str, tuple[int, ...]]] = [
        ("latent", (batch, 1, length, s["rank"])),
        ("rope", (batch, 1, length, rope)),
        ("rope_keys", (batch, heads, length, rope)),
        ("expanded", (batch, heads, length, s["nope"] + s["value"])),
    ]
    for what, part, dims in zip(("without position", "rotated"), _queries(match), (s["nope"], rope), strict=True):
        if shape(part) != (batch, heads, queries, dims):
            return wrong_shape(f"the part of the queries that is {what}", part, str([batch, heads, queries, dims]))
    key = (batch, length, shape(match["index_query"])[-1])
    return lightning_indexer.wrong_layout(match, batch, queries, length, key, wanted)


def check(match: Match, ctx: Context) -> Refusal | None:
    """Causal masks, positive scales, legal sizes and dtypes."""
    refusal = _layout(match)
    if refusal is not None:
        return refusal
    past = _masks(match)
    if isinstance(past, Refusal):
        return past
    refusal = lightning_indexer.not_positive(match)
    if refusal is not None:
        return refusal
    block = positions.block_size(sizes(match)["L"], ctx.block_size)
    if isinstance(block, str):
        return positions.block_refusal(block, match["latent"], sizes(match)["L"])
    reason = why_not_weight(ctx.program, match["kv_b"])
    if reason is not None:
        return computed_weight("kv_b_proj", match["kv_b"], reason)
    return _indexer_illegal(match, ctx, block) or _attention_illegal(match, ctx, block)


def _fake(ctx: Context, size: list[int], kind: torch.dtype) -> torch.Tensor:
    return ctx.editor.empty(size, kind)


def _indexer_illegal(match: Match, ctx: Context, block: int) -> Refusal | None:
    s = sizes(match)
    tokens, heads, dim = s["B"] * s["S"], *shape(match["index_query"])[-2:]
    blocks = s["B"] * s["L"] // block
    args = (_fake(ctx, [tokens, heads, dim], dtype(match["index_query"])),
            _fake(ctx, [blocks, block, 1, dim], dtype(match["index_key"])),
            _fake(ctx, [tokens, heads], dtype(match["head_weight"])))
    kwargs = _paged(ctx, s, block) | {"layout_key": "PA_BSND", "sparse_count": int(match["count"]), "sparse_mode": 3}
    kwargs["actual_seq_lengths_key"] = kwargs.pop("actual_seq_lengths_kv")
    given = {"query": match["index_query"], "key": match["index_key"], "weights": match["head_weight"]}
    return illegal("npu_lightning_indexer", args, kwargs, match["topk"], ctx, given)


def _attention_illegal(match: Match, ctx: Context, block: int) -> Refusal | None:
    s = sizes(match)
    tokens, blocks, rope = s["B"] * s["S"], s["B"] * s["L"] // block, shape(match["rope"])[3]
    latent = _fake(ctx, [blocks, block, 1, s["rank"]], dtype(match["latent"]))
    q_nope, q_rope = _queries(match)
    args = (_fake(ctx, [tokens, s["N"], s["rank"]], dtype(q_nope)), latent, latent,
            _fake(ctx, [tokens, 1, int(match["count"])], torch.int32), _scale(match))
    kwargs = _paged(ctx, s, block) | {
        "query_rope": _fake(ctx, [tokens, s["N"], rope], dtype(q_rope)),
        "key_rope": _fake(ctx, [blocks, block, 1, rope], dtype(match["rope"])),
        "sparse_block_size": 1, "layout_kv": "PA_BSND", "sparse_mode": 3, "attention_mode": 2,
    }
    given = {"query": q_nope, "key": match["latent"], "query_rope": q_rope, "key_rope": match["rope"]}
    return illegal("npu_sparse_flash_attention", args, kwargs, match.anchor, ctx, given)


def _paged(ctx: Context, s: dict[str, int], block: int) -> dict[str, Anything]:
    lengths = _fake(ctx, [s["B"]], torch.int32)
    return {"block_table": _fake(ctx, [s["B"], s["L"] // block], torch.int32), "actual_seq_lengths_query": lengths,
            "actual_seq_lengths_kv": lengths, "layout_query": "TND"}


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the indexer, the absorbed queries, the sparse attention and the value projection."""
    s = sizes(match)
    past = _masks(match)
    block = positions.block_size(s["L"], ctx.block_size)
    assert isinstance(past, Causal)
    assert isinstance(block, int)
    ends = positions.query_ends(ctx, s["B"], s["S"])
    lengths = positions.key_lengths(ctx, past, s["B"], s["S"])
    table = positions.block_table(ctx, s["B"], s["L"], block)
    picks = _emit_indexer(match, ctx, block, ends, lengths, table)
    attended = _emit_attention(match, ctx, block, picks, ends, lengths, table)
    ctx.editor.replace(match.anchor, _emit_values(match, ctx, attended))


def _blocks(ctx: Context, cache: fx.Node, s: dict[str, int], block: int) -> fx.Node:
    return ctx.editor.reshape(cache, [s["B"] * s["L"] // block, block, 1, shape(cache)[-1]])


def _emit_indexer(match: Match, ctx: Context, block: int, ends: fx.Node, lengths: fx.Node, table: fx.Node) -> fx.Node:
    s, call, reshape = sizes(match), ctx.editor.call, ctx.editor.reshape
    tokens, heads, dim = s["B"] * s["S"], *shape(match["index_query"])[-2:]
    chosen = call(
        torch.ops.npu.npu_lightning_indexer.default,
        reshape(match["index_query"], [tokens, heads, dim]),
        _blocks(ctx, match["index_key"], s, block),
        reshape(match["head_weight"], [tokens, heads]),
        actual_seq_lengths_query=ends, actual_seq_lengths_key=lengths, block_table=table,
        layout_query="TND", layout_key="PA_BSND", sparse_count=int(match["count"]), sparse_mode=3,
    )
    return call(operator.getitem, chosen, 0)


def _emit_attention(match: Match, ctx: Context, block: int, picks: fx.Node, ends: fx.Node, lengths: fx.Node,
                    table: fx.Node) -> fx.Node:
    s, call, reshape = sizes(match), ctx.editor.call, ctx.editor.reshape
    tokens, width = s["B"] * s["S"], s["nope"] + s["value"]
    w_uk = derived(ctx.program, ctx.editor, "w_uk", [match["kv_b"]],
                   f"w[0].reshape({s['N']}, {width}, {s['rank']})[:, :{s['nope']}]")
    q_nope, q_rope = _queries(match)
    absorbed = call(aten.matmul.default, q_nope, w_uk)
    query, query_rope = (
        reshape(call(aten.permute.default, q, [0, 2, 1, 3]), [tokens, s["N"], shape(q)[-1]])
        for q in (absorbed, q_rope)
    )
    latent = _blocks(ctx, match["latent"], s, block)
    out = call(
        torch.ops.npu.npu_sparse_flash_attention.default,
        query, latent, latent, picks, _scale(match),
        block_table=table, actual_seq_lengths_query=ends, actual_seq_lengths_kv=lengths,
        query_rope=query_rope, key_rope=_blocks(ctx, match["rope"], s, block), sparse_block_size=1,
        layout_query="TND", layout_kv="PA_BSND", sparse_mode=3, attention_mode=2,
    )
    return call(operator.getitem, out, 0)


def _emit_values(match: Match, ctx: Context, attended: fx.Node) -> fx.Node:
    """[T, N, 512] · W_UV [N, 512, Dv] in the layout of the attention that is replaced: [B, N, S, Dv]."""
    s, call = sizes(match), ctx.editor.call
    width = s["nope"] + s["value"]
    recipe = f"w[0].reshape({s['N']}, {width}, {s['rank']})[:, {s['nope']}:].transpose(1, 2)"
    perms = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    fakes = (attended.meta["val"], preview(ctx.editor, [match["kv_b"]], recipe))
    refused = illegal("npu_transpose_batchmatmul", fakes, perms, match.anchor, ctx)
    w_uv = derived(ctx.program, ctx.editor, "w_uv", [match["kv_b"]], recipe)
    if refused is None:
        values = call(torch.ops.npu.npu_transpose_batchmatmul.default, attended, w_uv, **perms)
    else:
        per_head = call(aten.matmul.default, call(aten.permute.default, attended, [1, 0, 2]), w_uv)
        values = call(aten.permute.default, per_head, [1, 0, 2])
    values = ctx.editor.reshape(values, [s["B"], s["S"], s["N"], s["value"]])
    return call(aten.permute.default, values, [0, 2, 1, 3])


RULE = Rule(
    name="sparse_flash_attention",
    equation=(
        "softmax(topk_mask(q [W_UK c; r]ᵀ)) (W_UV c)  →  "
        "lightning_indexer + sparse_flash_attention(q W_UK, c, r) W_UV"
    ),
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_sparse_flash_attention",
    near=NEVER,  # latent attention without an indexer is none that comes near
    core=MARKED,
)
