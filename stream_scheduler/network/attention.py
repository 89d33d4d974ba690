"""Attention of one layer in the structure that expert-written models use on Ascend."""

from __future__ import annotations

import math

from cannopy.stream_scheduler.network.builder import Builder, Scene, linear


def attention(b: Builder, s: Scene, x: str) -> str:
    """From the normalised hidden state ``x`` to the output of o_proj; names of tasks."""
    if s.model.attention.kind == "gqa":
        out = _gqa(b, s, x)
    elif s.load.phase == "prefill" and s.model.attention.indexer is None:
        out = _mla_naive(b, s, x)
    else:
        out = _mla_absorbed(b, s, x)
    return _o_proj(b, s, out)


def cache_bytes(s: Scene) -> float:
    """Bytes per element of a cache row that the attention kernel reads: 2, or the int8 row with its scales."""
    a = s.model.attention
    if s.quant.cache == "bf16":
        return 2.0
    return a.cache_row_int8 / (a.rank + a.rope) if a.kind == "mla" else 1.0


def _mla_absorbed(b: Builder, s: Scene, x: str) -> str:
    """Prolog, (indexer and sparse attention | attention over the latent cache), W_UV."""
    a, T = s.model.attention, s.tokens
    if s.is_int8("q_a"):
        x = b.call("prolog_quant", "dynamic_quant", x, rows=T, width=s.model.hidden)
    prolog = b.call(
        "mla_prolog", "mla_prolog", x, tokens=T, hidden=s.model.hidden, q_rank=a.q_rank, heads=s.heads, rank=a.rank,
        rope=a.rope, nope=a.nope, down_bytes=s.quant.bytes_of("q_a", s.model),
        up_bytes=s.quant.bytes_of("q_b", s.model), uk_bytes=2, cache_bytes=cache_bytes(s),
    )
    sizes = {"batch": s.load.sequences, "q_tokens": s.load.q_tokens, "heads": s.heads, "rank": a.rank, "rope": a.rope,
             "context": s.load.context, "cache_bytes": cache_bytes(s)}
    if s.parallel.kvp > 1:  # each query is a request of its own, with a part of the rows
        sizes |= {"batch": T, "q_tokens": 1, "context": math.ceil(s.load.context / s.parallel.kvp)}
    if a.indexer is None:
        int8 = s.quant.cache == "int8"
        out = b.call("attention", f"fused_infer_attention_mla{'_int8' * int8}", prolog, **sizes)
        out = _joined(b, s, out)
    else:
        picked = _indexer(b, s, x, prolog)
        out = b.call("sparse_attention", "sparse_flash_attention", prolog, picked, selected=a.indexer.selected, **sizes)
    return b.call("w_uv", "batch_matmul", out, batch=s.own_heads, m=T, k=a.rank, n=a.value)


def _joined(b: Builder, s: Scene, x: str) -> str:
    """What all heads have found in the rows of each die, exchanged by heads and joined by its log-sum-exp."""
    rank, heads, dies = s.model.attention.rank, s.heads * s.tokens, s.parallel.kvp
    if dies == 1:
        return x
    x = b.call("attention_empty", "elementwise", x, elements=heads * rank)
    out = b.call("kvp_all_to_all", "all_to_all", x, ranks=dies, bytes_per_rank=2 * heads * rank)
    sums = b.call("kvp_sums_all_to_all", "all_to_all", x, ranks=dies, bytes_per_rank=4 * heads)
    return b.call("attention_update", "elementwise", out, sums, elements=heads / dies * rank, inputs=dies)


def _indexer(b: Builder, s: Scene, x: str, prolog: str) -> str:
    """Queries and weights beside keys, then the index; int8 keys get a Hadamard rotation and their scales."""
    a, i, T, hidden = s.model.attention, s.model.attention.indexer, s.tokens, s.model.hidden
    if i is None:
        raise ValueError(f"{s.model.title} has no indexer")
    int8 = s.quant.cache == "int8"
    with b.stream("indexer_q"):
        wq_b = linear(b, s, "indexer_wq_b", "indexer_q", prolog, T, a.q_rank, i.heads * i.dim, quantised=True)
        q = b.call("indexer_q_rope", "rotary", wq_b, rows=T, heads=i.heads, dim=a.rope)
        q = b.call("indexer_q_cat", "cat", q, elements=T * i.heads * i.dim)
        if int8:
            q = _hadamard(b, "indexer_q", q, T * i.heads, i.dim)
    with b.stream("indexer_weights"):
        weights = b.call("indexer_weights", "bf16_matmul", x, b.order(wq_b), m=T, k=hidden, n=i.heads)
    k = b.call("indexer_wk", "bf16_matmul", x, m=T, k=hidden, n=i.dim)
    k = b.call("indexer_k_norm", "layer_norm", k, rows=T, width=i.dim)
    k = b.call("indexer_k_rope", "rotary", k, rows=T, heads=1, dim=a.rope)
    k = b.call("indexer_k_cat", "cat", k, elements=T * i.dim)
    deps = []
    if int8:
        k = _hadamard(b, "indexer_k", k, T, i.dim)
        deps.append(b.call("indexer_scale_write", "cache_update", k, rows=T, width=1, bytes=2))
    deps.append(b.call("indexer_key_write", "cache_update", k, rows=T, width=i.dim, bytes=1 if int8 else 2))
    kernel = f"lightning_indexer{'_int8' * int8}"
    return b.call("lightning_indexer", kernel, q, weights, *deps, batch=s.load.sequences,
                  q_tokens=s.load.q_tokens, context=s.load.context, heads=i.heads, dim=i.dim, selected=i.selected,
                  key_bytes=1 if int8 else 2)


def _hadamard(b: Builder, label: str, x: str, rows: int, dim: int) -> str:
    x = b.call(f"{label}_hadamard", "bf16_matmul", x, m=rows, k=dim, n=dim)
    return b.call(f"{label}_quant", "dynamic_quant", x, rows=rows, width=dim)


def _mla_naive(b: Builder, s: Scene, x: str) -> str:
    """Prefill of MLA without an indexer: keys and values of every head are expanded from the latent."""
    a, T, hidden = s.model.attention, s.tokens, s.model.hidden
    q = linear(b, s, "q_a", "q_a", x, T, hidden, a.q_rank)
    q = b.call("q_norm", "rms_norm", q, rows=T, width=a.q_rank)
    q = linear(b, s, "q_b", "q_b", q, T, a.q_rank, s.heads * (a.nope + a.rope))
    q = b.call("q_rope", "interleave_rope", q, rows=T, heads=s.heads, dim=a.rope)
    kv = linear(b, s, "kv_a", "kv_a", x, T, hidden, a.rank + a.rope)
    kv = b.call("kv_write", "kv_rmsnorm_rope_cache", kv, tokens=T, rank=a.rank, rope=a.rope, cache_bytes=cache_bytes(s))
    k = b.call("k_up", "batch_matmul", kv, batch=s.heads, m=T, k=a.rank, n=a.nope)
    v = b.call("v_up", "batch_matmul", kv, batch=s.heads, m=T, k=a.rank, n=a.value)
    return b.call("attention", "fused_infer_attention_prefill", q, k, v, batch=s.load.sequences, tokens=s.load.context,
                  heads=s.heads, kv_heads=s.heads, dim=a.nope + a.rope, value_dim=a.value)


def _gqa(b: Builder, s: Scene, x: str) -> str:
    """Grouped-query attention; key and value heads are repeated where there are more dies than heads."""
    a, T, hidden = s.model.attention, s.tokens, s.model.hidden
    kv_heads = max(1, a.kv_heads // s.parallel.attn_tp)
    qkv = linear(b, s, "qkv", "qkv", x, T, hidden, (s.heads + 2 * kv_heads) * a.dim)
    q = k = qkv
    if a.qk_norm:
        q = b.call("q_norm", "rms_norm", q, rows=T * s.heads, width=a.dim)
        k = b.call("k_norm", "rms_norm", k, rows=T * kv_heads, width=a.dim)
    rope = b.call("rope", "rotary", q, k, rows=T, heads=s.heads + kv_heads, dim=a.dim)
    write = b.call("cache_write", "cache_update", rope, rows=T, width=2 * kv_heads * a.dim, bytes=cache_bytes(s))
    if s.load.phase == "prefill":
        return b.call("attention", "fused_infer_attention_prefill", rope, write, batch=s.load.sequences,
                      tokens=s.load.context, heads=s.heads, kv_heads=kv_heads, dim=a.dim, value_dim=a.dim)
    return b.call("attention", "fused_infer_attention_gqa", rope, write, batch=s.load.sequences,
                  q_tokens=s.load.q_tokens, context=s.load.context, heads=s.heads, kv_heads=kv_heads, dim=a.dim,
                  cache_bytes=cache_bytes(s))


def _o_proj(b: Builder, s: Scene, x: str) -> str:
    """o_proj whole, cut by heads (all-reduce), or shared by a group of data-parallel dies (all-to-all before,
    reduce-scatter after)."""
    a, T, hidden, tp = s.model.attention, s.tokens, s.model.hidden, s.parallel.o_proj_tp
    width = s.own_heads * (a.value if a.kind == "mla" else a.dim)
    if tp > 1:
        x = b.call("o_proj_all_to_all", "all_to_all", x, ranks=tp, bytes_per_rank=2 * T * width)
    out = linear(b, s, "o_proj", "o_proj", x, T * tp, width / tp, hidden)
    if tp > 1:
        return b.call("o_proj_reduce_scatter", "reduce_scatter", out, ranks=tp, bytes_per_rank=2 * T * hidden)
    if s.same > 1:
        return b.call("o_proj_all_reduce", "all_reduce", out, ranks=s.same, bytes_per_rank=2 * T * hidden)
    return out
