"""attention(q, k, v, mask)  →  npu_fused_infer_attention_score_v2(q, k, v, lengths), causal by position.

    latents in a cache, up to 16 queries   →  absorbed: (attention(q W_UK, c) over the cache) · W_UV, layout TND_NTD
    keys and values expanded from latents  →  packed tokens with the rotated part apart, layout TND
    one prompt behind the other            →  packed tokens, layout TND
    keys and values in a paged cache       →  the cache itself, layout BSND with the model's block table
    other grouped heads                    →  layout BNSD; lengths end the keys of a static cache

Masks become lengths only where the graph proves what they show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Number, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION, torchair_op
from cannopy.fusion_rules.rewrite import latent_attention, positions
from cannopy.fusion_rules.rewrite.attention_operands import SWAP, Cache, Visible, cached, own_heads, rows, visible
from cannopy.fx_passes.affine import Causal
from cannopy.fx_passes.graph import aten, dtype, shape
from cannopy.fx_passes.packed import Packed
from cannopy.fx_passes.strides import View, view

PATTERN = op("cannopy::attention", Any("q"), Any("k"), Any("v"), Any("mask"), Number("scale"), Any("is_causal"),
             Any("enable_gqa"), rest=True)


@dataclass(frozen=True)
class Grouped:
    """Keys and values [B, K, T, D] of their own heads; ``caches`` where both are rows of caches with a block table."""

    key: fx.Node
    value: fx.Node
    caches: tuple[Cache, Cache] | None


def grouped(match: Match) -> Grouped:
    """The keys and values without repeated heads."""
    key, value = match["k"], match["v"]
    if not match["enable_gqa"]:
        found = own_heads(key), own_heads(value)
        if shape(found[0])[1] == shape(found[1])[1]:
            key, value = found
    paged = [_paged(view(node)) for node in (key, value)]
    together = paged[0] is not None and paged[1] is not None and (
        (paged[0].table, paged[0].block) == (paged[1].table, paged[1].block)) and shape(key) == shape(value)
    return Grouped(key, value, (paged[0], paged[1]) if together else None)  # type: ignore[arg-type]


def _paged(seen: View) -> Cache | None:
    """The paged cache whose rows [B, L, K · D] are seen as [B, K, L, D]."""
    batch, heads, length, dim = seen.size
    if not seen.matches(seen.size, (length * heads * dim, dim, heads * dim, 1)):
        return None
    flat = View(seen.source, (batch, length, heads * dim),
                (0 if batch == 1 else length * heads * dim, 0 if length == 1 else heads * dim, 1))
    found = cached(flat)
    return found if found is not None and found.table is not None else None


def check(match: Match, ctx: Context) -> Refusal | None:
    """A mask that is proven to be causal, four dims each, and the contract of the operator for the form taken."""
    sizes = [shape(match[name]) for name in ("q", "k", "v")]
    if any(len(s) != 4 for s in sizes) or len({s[0] for s in sizes}) > 1:
        return Refusal("the attention is not over [B, N, S, D] with one batch", match.anchor, "shape",
                       "q, k and v of four dims with one batch size", ", ".join(str(list(s)) for s in sizes),
                       "give q, k and v a batch dim and a dim of heads")
    if torchair_op(FUSED_INFER_ATTENTION) is None:
        return Refusal("this torchair has no fused attention that takes its lengths as tensors", match.anchor,
                       "operation", f"torchair.ops.{FUSED_INFER_ATTENTION}", "none", "install a newer torch_npu")
    seen = visible(match)
    if isinstance(seen, Refusal):
        return seen
    found = latent_attention.latent(match)
    if found is not None:
        return latent_attention.check(match, ctx, found, seen)
    return _illegal(match, ctx, seen)


def _layout(match: Match, found: Grouped, seen: Visible) -> str:
    if isinstance(seen, Packed):
        return "TND"
    if found.caches is not None:
        return "BSND"
    return "BNSD" if shape(match["q"])[2] == 1 else "BNSD_BSND"


def _attributes(match: Match, found: Grouped, seen: Visible) -> dict[str, Anything]:
    causal = seen is not None and (isinstance(seen, Packed) or shape(match["q"])[2] > 1)
    block = found.caches[0].block if found.caches is not None and not isinstance(seen, Packed) else 0
    return {"num_query_heads": shape(match["q"])[1], "num_key_value_heads": shape(found.key)[1],
            "softmax_scale": float(match["scale"]), "input_layout": _layout(match, found, seen),
            "sparse_mode": 3 if causal else 0, "block_size": block}


def _illegal(match: Match, ctx: Context, seen: Visible) -> Refusal | None:
    found, empty = grouped(match), ctx.editor.empty
    batch, heads, queries, dim = shape(match["q"])
    attributes = _attributes(match, found, seen)
    layout, block = attributes["input_layout"], attributes["block_size"]
    kv_heads, length = shape(found.key)[1:3]
    sizes = {"TND": [batch * queries, heads, dim], "BSND": [batch, queries, heads, dim]}
    args = [empty(sizes.get(layout, list(shape(match["q"]))), dtype(match["q"]))]
    for node in (found.key, found.value):
        size = list(shape(node))
        if layout == "TND":
            size = [batch * length, kv_heads, size[3]]
        elif block:
            assert found.caches is not None
            size = [math.prod(shape(found.caches[0].new)) // (kv_heads * size[3] * block), block, kv_heads * size[3]]
        args.append(empty(size, dtype(node)))
    count = math.prod(shape(seen.ends)) + 1 if isinstance(seen, Packed) else batch
    lengths = empty([count], torch.int64)
    kwargs = attributes | {
        "atten_mask": empty([2048, 2048], torch.bool) if attributes["sparse_mode"] else None,
        "actual_seq_qlen": lengths if layout == "TND" else None, "actual_seq_kvlen": lengths,
        "block_table": empty([batch, length // block], torch.int32) if block else None,
    }
    return illegal(FUSED_INFER_ATTENTION, args, kwargs, match.anchor, ctx)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the form that `check` has found legal."""
    seen = visible(match)
    assert not isinstance(seen, Refusal)
    found = latent_attention.latent(match)
    if found is not None:
        latent_attention.rewrite(match, ctx, found, seen)
    else:
        _emit(match, ctx, seen)


def _emit(match: Match, ctx: Context, seen: Visible) -> None:
    found, editor = grouped(match), ctx.editor
    attributes = _attributes(match, found, seen)
    layout = attributes["input_layout"]
    batch, heads, queries, _ = shape(match["q"])
    kv_heads, length = shape(found.key)[1:3]
    operands: list[fx.Node] = [match["q"], found.key, found.value]
    lengths: dict[str, fx.Node | None] = {}
    if layout == "TND":
        operands = [rows(ctx, node) for node in operands]
        ends = positions.packed_ends(ctx, seen, batch, queries, length)
        lengths = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
    else:
        past = seen if isinstance(seen, Causal) else Causal(None, length - queries)
        lengths = {"actual_seq_kvlen": positions.key_lengths(ctx, past, batch, queries, torch.int64)}
    if layout == "BSND":
        assert found.caches is not None
        block, width = attributes["block_size"], kv_heads * shape(found.key)[3]
        operands = [editor.call(aten.permute.default, match["q"], SWAP)] + [
            editor.reshape(c.new, [math.prod(shape(c.new)) // (width * block), block, width]) for c in found.caches]
        lengths["block_table"] = latent_attention.table_of(ctx, found.caches[0], batch, length, block)
    mask = positions.causal_mask(ctx) if attributes["sparse_mode"] else None
    out = editor.item(editor.call(torchair_op(FUSED_INFER_ATTENTION), *operands, atten_mask=mask, **lengths,
                                  **attributes), 0)
    if layout != "BNSD":
        out = editor.reshape(out, [batch, queries, heads, shape(out)[-1]])
        out = editor.call(aten.permute.default, out, SWAP)
    editor.replace(match.anchor, out)


RULE = Rule(
    name="fused_infer_attention",
    equation="attention(q, k, v, causal by position)  →  fused_infer_attention_score_v2(q, k, v, lengths)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel=FUSED_INFER_ATTENTION,
    near=1,
    supersedes=("sparse_flash_attention",),
)
