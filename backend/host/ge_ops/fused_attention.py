"""MLA prolog, lightning indexer, sparse and dense attention through the CPU kernels of torch.ops.npu.

Inputs are handed over by their GE names, which are the npu op's argument names; attributes by the names that
torchair's converters give them (they differ from the argument's where a comment says so).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor
from cannopy.fusion_rules.engine.torchair_ops import torchair_op

_LONGEST = (1 << 63) - 1
_ALL_TOKENS = (1 << 31) - 1


def named(op: Op, args: Sequence[Tensor | None], keep_none: bool = False) -> dict[str, Tensor | None]:
    """The inputs that are fed, by name."""
    return {n: a for n, a in zip(op.inputs, args, strict=True) if keep_none or a is not None}


def mla_prolog_v3(op: Op) -> Kernel:
    """(query, query_rope, kv_cache, kr_cache, dequant_scale_q_nope, query_norm, dequant_scale_q_norm); both caches
    are written in place."""
    ref = op.inputs[9:11]
    if ref != ("kv_cache", "kr_cache"):
        raise op.error(f"inputs 9 and 10 are {ref}, expected kv_cache and kr_cache")
    attrs = {
        "rmsnorm_epsilon_cq": op.number("rmsnorm_epsilon_cq", 1e-5),
        "rmsnorm_epsilon_ckv": op.number("rmsnorm_epsilon_ckv", 1e-5),
        "cache_mode": op.text("cache_mode", "PA_BSND"),
        "query_norm_flag": op.flag("query_norm_flag", False),
        "weight_quant_mode": op.integer("weight_quant_mode", 0),
        "kv_cache_quant_mode": op.integer("kv_cache_quant_mode", 0),
        "query_quant_mode": op.integer("query_quant_mode", 0),
        "ckvkr_repo_mode": op.integer("ckvkr_repo_mode", 0),
        "quant_scale_repo_mode": op.integer("quant_scale_repo_mode", 0),
        "tile_size": op.integer("tile_size", 128),
        "qc_qr_scale": op.number("qc_qr_scale", 1.0),
        "kc_scale": op.number("kc_scale", 1.0),
    }

    def kernel(*args: Tensor | None) -> tuple[Tensor | None, ...]:
        query, rope, scale_nope, norm, scale_norm = torch.ops.npu.npu_mla_prolog_v3(**named(op, args), **attrs)
        return query, rope, args[9], args[10], scale_nope, norm, scale_norm

    return kernel


def kv_rmsnorm_rope_cache(op: Op) -> Kernel:
    """(k_cache, ckv_cache, k_rope, c_kv); both caches are written in place."""
    ref = op.inputs[5:7]
    if ref != ("k_cache", "ckv_cache"):
        raise op.error(f"inputs 5 and 6 are {ref}, expected k_cache and ckv_cache")
    attrs = {
        "epsilon": op.number("epsilon", 1e-5),
        "cache_mode": op.text("cache_mode", "Norm"),
        "is_output_kv": op.flag("is_output_kv", False),
    }

    def kernel(*args: Tensor | None) -> tuple[Tensor | None, ...]:
        rope, latent, *new = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(**named(op, args), **attrs)
        for cache, value in zip(args[5:7], new, strict=True):
            assert cache is not None
            cache.copy_(value)
        return args[5], args[6], rope, latent

    return kernel


def lightning_indexer(op: Op) -> Kernel:
    """(sparse_indices, sparse_values). The attribute is return_values, the argument return_value."""
    attrs = {
        "layout_query": op.text("layout_query", "BSND"),
        "layout_key": op.text("layout_key", "BSND"),
        "sparse_count": op.integer("sparse_count", 2048),
        "sparse_mode": op.integer("sparse_mode", 3),
        "pre_tokens": op.integer("pre_tokens", _LONGEST),
        "next_tokens": op.integer("next_tokens", _LONGEST),
        "return_value": op.flag("return_values", False),
    }
    return lambda *args: torch.ops.npu.npu_lightning_indexer(**named(op, args), **attrs)


def sparse_flash_attention(op: Op) -> Kernel:
    """(attention_out, softmax_max, softmax_sum)."""
    attrs = {
        "scale_value": op.number("scale_value", 1.0),
        "sparse_block_size": op.integer("sparse_block_size", 1),
        "layout_query": op.text("layout_query", "BSND"),
        "layout_kv": op.text("layout_kv", "BSND"),
        "sparse_mode": op.integer("sparse_mode", 3),
        "pre_tokens": op.integer("pre_tokens", _LONGEST),
        "next_tokens": op.integer("next_tokens", _LONGEST),
        "attention_mode": op.integer("attention_mode", 0),
        "return_softmax_lse": op.flag("return_softmax_lse", False),
    }
    return lambda *args: torch.ops.npu.npu_sparse_flash_attention(**named(op, args), **attrs)


def fused_infer_attention_score(op: Op) -> Kernel:
    """(attention_out, softmax_lse). Quantised forms are inputs and attributes that the kernel's contract refuses."""
    names = {"key0": "key", "value0": "value", "actual_seq_lengths": "actual_seq_qlen",
             "actual_seq_lengths_kv": "actual_seq_kvlen"}
    attrs = {
        "num_query_heads": op.integer("num_heads", 1),
        "num_key_value_heads": op.integer("num_key_value_heads", 0),
        "softmax_scale": op.number("scale", 1.0),
        "input_layout": op.text("input_layout", "BSH"),
        "pre_tokens": op.integer("pre_tokens", _ALL_TOKENS),
        "next_tokens": op.integer("next_tokens", _ALL_TOKENS),
        "sparse_mode": op.integer("sparse_mode", 0),
        "block_size": op.integer("block_size", 0),
        "inner_precise": op.integer("inner_precise", 0),
        "query_quant_mode": op.integer("query_quant_mode", 0),
        "key_quant_mode": op.integer("key_antiquant_mode", 0),
        "value_quant_mode": op.integer("value_antiquant_mode", 0),
        "return_softmax_lse": op.flag("softmax_lse_flag", False),
    }
    kernel = torchair_op("npu_fused_infer_attention_score_v2")
    return lambda *args: kernel(**{names.get(n, n): a for n, a in named(op, args).items()}, **attrs)


def attention_update(op: Op) -> Kernel:
    """(output, lse_m). Both dynamic inputs have ``sp`` parts."""
    lse, outs, kind = op.span("lse"), op.span("go"), op.integer("update_type", 0)

    def kernel(*args: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.npu.npu_attention_update(args[lse], args[outs], kind)  # type: ignore[no-any-return]

    return kernel


OPS: dict[str, Builder] = {
    "AttentionUpdate": attention_update,
    "FusedInferAttentionScore": fused_infer_attention_score,
    "KvRmsNormRopeCache": kv_rmsnorm_rope_cache,
    "LightningIndexer": lightning_indexer,
    "MlaPrologV3": mla_prolog_v3,
    "SparseFlashAttention": sparse_flash_attention,
}
