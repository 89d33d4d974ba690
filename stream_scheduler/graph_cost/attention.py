"""Attention, MLA prolog, indexer. Contexts are what the caches hold: lengths are known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from cannopy.stream_scheduler.graph_cost.shapes import Call, argument, itemsize, number, numel, rows, shape, width


def prolog(node: fx.Node) -> Call:
    """npu_mla_prolog_v3: sizes are those of its weights."""
    x, down, up, uk = node.args[0], node.args[1], node.args[2], node.args[3]
    heads, nope, rank = shape(uk)
    kv_down = argument(node, 4, "weight_dkv_kr")
    return Call("mla_prolog", {
        "tokens": rows(x), "hidden": width(x), "q_rank": width(down), "heads": float(heads), "rank": float(rank),
        "nope": float(nope), "rope": width(kv_down) - rank, "down_bytes": itemsize(down), "up_bytes": itemsize(up),
        "uk_bytes": itemsize(uk), "cache_bytes": itemsize(argument(node, 9, "kv_cache")),
    })


def _context(node: fx.Node, cache: Any) -> tuple[float, float]:
    """(sequences, tokens of each) by the block table, the number of lengths of packed rows, or the cache alone."""
    table = node.kwargs.get("block_table")
    if isinstance(table, fx.Node) and len(shape(table)) == 2:
        sequences, blocks = shape(table)
        return float(max(1, sequences)), float(max(1, blocks * shape(cache)[1]))
    found, ends = shape(cache), node.kwargs.get("actual_seq_lengths_query")
    if len(found) == 3 and isinstance(ends, fx.Node):
        return float(max(1, shape(ends)[0])), max(1.0, found[0] / max(1, shape(ends)[0]))
    return float(found[0]), float(max(1, found[-2]))


def indexer(node: fx.Node) -> Call:
    """npu_lightning_indexer and its quantised form."""
    q, key = argument(node, 0, "query"), argument(node, 1, "key")
    sequences, context = _context(node, key)
    tokens = numel(q) / (shape(q)[-2] * width(q))
    kernel = "lightning_indexer_int8" if itemsize(key) == 1 else "lightning_indexer"
    return Call(kernel, {
        "batch": sequences, "q_tokens": max(1.0, tokens / sequences), "context": context, "heads": float(shape(q)[-2]),
        "dim": width(q), "key_bytes": itemsize(key), "selected": number(node, "sparse_count", 2048),
    })


def sparse(node: fx.Node) -> Call:
    """npu_sparse_flash_attention: as many tokens as the index names, at most what the cache holds."""
    q, cache, index = argument(node, 0, "query"), argument(node, 1, "key"), argument(node, 3, "sparse_indices")
    sequences, context = _context(node, cache)
    tokens = numel(q) / (shape(q)[-2] * width(q))
    rope = node.kwargs.get("query_rope")
    return Call("sparse_flash_attention", {
        "batch": sequences, "q_tokens": max(1.0, tokens / sequences), "context": context, "heads": float(shape(q)[-2]),
        "selected": width(index), "rank": width(q), "rope": width(rope) if isinstance(rope, fx.Node) else 64.0,
        "cache_bytes": itemsize(cache),
    })


def fused(node: fx.Node) -> Call:
    """npu_fused_infer_attention_score: latent attention with one cached head and a rope part, grouped-query attention
    over a paged cache, or attention over the new keys themselves."""
    q, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    heads = number(node, "num_heads", 0) or number(node, "num_query_heads", 0) or float(shape(q)[-2])
    kv_heads = number(node, "num_key_value_heads", 0) or heads
    rope = node.kwargs.get("query_rope")
    layout = str(node.kwargs.get("input_layout", "BSH"))
    dim = width(q) / heads if layout.startswith("BSH") else width(q)
    tokens = numel(q) / (heads * dim)
    rope_dim = width(rope) if isinstance(rope, fx.Node) else 0.0
    if isinstance(node.kwargs.get("block_table"), fx.Node):
        sequences, context = _context(node, key)
        sizes = {"batch": sequences, "q_tokens": max(1.0, tokens / sequences), "context": context, "heads": heads,
                 "cache_bytes": itemsize(key)}
        if rope_dim and kv_heads == 1:
            kernel = "fused_infer_attention_mla_int8" if itemsize(q) == 1 else "fused_infer_attention_mla"
            return Call(kernel, {**sizes, "rank": dim, "rope": rope_dim})
        return Call("fused_infer_attention_gqa", {**sizes, "kv_heads": kv_heads, "dim": dim})
    sequences = float(max(1, shape(q)[0])) if layout.startswith("B") else 1.0
    key_tokens = numel(key) / (kv_heads * (dim or 1.0)) / sequences
    if tokens / sequences < key_tokens:
        return Call("fused_infer_attention_gqa", {
            "batch": sequences, "q_tokens": max(1.0, tokens / sequences), "context": key_tokens, "heads": heads,
            "kv_heads": kv_heads, "dim": dim + rope_dim, "cache_bytes": itemsize(key)})
    return Call("fused_infer_attention_prefill", {
        "batch": sequences, "tokens": max(1.0, tokens / sequences), "heads": heads, "kv_heads": kv_heads,
        "dim": dim + rope_dim, "value_dim": width(value) / (kv_heads if layout.startswith("BSH") else 1.0)})


def kv_write(node: fx.Node) -> Call:
    """npu_kv_rmsnorm_rope_cache."""
    kv, cache = argument(node, 0, "kv"), argument(node, 6, "ckv_cache")
    rank = width(argument(node, 1, "gamma"))
    return Call("kv_rmsnorm_rope_cache", {"tokens": rows(kv), "rank": rank, "rope": width(kv) - rank,
                                          "cache_bytes": itemsize(cache)})


TABLE: dict[str, Callable[[fx.Node], Call]] = {
    "npu.npu_mla_prolog_v3": prolog, "npu.npu_mla_prolog_v3_functional": prolog,
    "npu.npu_lightning_indexer": indexer, "npu.npu_quant_lightning_indexer": indexer,
    "npu.npu_sparse_flash_attention": sparse, "npu.npu_kv_quant_sparse_flash_attention": sparse,
    "npu.npu_fused_infer_attention_score": fused, "npu.npu_fused_infer_attention_score_v2": fused,
    "air.npu_fused_infer_attention_score": fused, "air.npu_fused_infer_attention_score_v2": fused,
    "npu.npu_kv_rmsnorm_rope_cache": kv_write, "npu.npu_kv_rmsnorm_rope_cache_v2": kv_write,
    "npu.npu_kv_rmsnorm_rope_cache_v2_functional": kv_write,
}
