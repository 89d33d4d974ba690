"""Legal calls of every op that has a contract, on meta tensors, by variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BF16, FP16, FP32, INT32, INT64, INT8 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.int8,
)
Call = dict[str, Any]


def t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def prolog(tokens: tuple[int, ...] = (6,), heads: int = 4, **changes: Any) -> Call:
    flat = len(tokens) == 1
    call: Call = {
        "token_x": t(*tokens, 1024),
        "weight_dq": t(1024, 1536),
        "weight_uq_qr": t(1536, heads * 192),
        "weight_uk": t(heads, 128, 512),
        "weight_dkv_kr": t(1024, 576),
        "rmsnorm_gamma_cq": t(1536),
        "rmsnorm_gamma_ckv": t(512),
        "rope_sin": t(*tokens, 64),
        "rope_cos": t(*tokens, 64),
        "kv_cache": t(3, 128, 1, 512),
        "kr_cache": t(3, 128, 1, 64),
        "cache_index": t(*tokens, dtype=INT64),
        "cache_mode": "PA_BSND",
        "query_norm_flag": flat,
    }
    return call | changes


def prolog_int8(**changes: Any) -> Call:
    call = prolog() | {
        "weight_quant_mode": 2,
        "token_x": t(6, 1024, dtype=INT8),
        "weight_dq": t(1024, 1536, dtype=INT8),
        "weight_uq_qr": t(1536, 4 * 192, dtype=INT8),
        "weight_dkv_kr": t(1024, 576, dtype=INT8),
        "dequant_scale_x": t(6, 1, dtype=FP32),
    }
    return call | changes


def indexer_paged(**changes: Any) -> Call:
    call: Call = {
        "query": t(6, 8, 128),
        "key": t(4, 128, 1, 128),
        "weights": t(6, 8),
        "actual_seq_lengths_query": t(2, dtype=INT32),
        "actual_seq_lengths_key": t(2, dtype=INT32),
        "block_table": t(2, 2, dtype=INT32),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": 64,
    }
    return call | changes


def indexer_bsnd() -> Call:
    return {"query": t(2, 3, 8, 128), "key": t(2, 9, 1, 128), "weights": t(2, 3, 8)}


def indexer_tnd() -> Call:
    return indexer_paged(key=t(9, 1, 128), layout_key="TND", block_table=None)


def attention_paged(**changes: Any) -> Call:
    cache = t(4, 128, 1, 512)
    call: Call = {
        "query": t(6, 4, 512),
        "key": cache,
        "value": cache,
        "sparse_indices": t(6, 1, 16, dtype=INT32),
        "scale_value": 0.1,
        "block_table": t(2, 2, dtype=INT32),
        "actual_seq_lengths_query": t(2, dtype=INT32),
        "actual_seq_lengths_kv": t(2, dtype=INT32),
        "query_rope": t(6, 4, 64),
        "key_rope": t(4, 128, 1, 64),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }
    return call | changes


def attention_tnd() -> Call:
    keys = t(9, 1, 512)
    return attention_paged(key=keys, value=keys, key_rope=t(9, 1, 64), layout_kv="TND", block_table=None)


def attention_bsnd() -> Call:
    keys = t(2, 9, 1, 512)
    return {
        "query": t(2, 3, 4, 512),
        "key": keys,
        "value": keys,
        "sparse_indices": t(2, 3, 1, 16, dtype=INT32),
        "scale_value": 0.1,
        "query_rope": t(2, 3, 4, 64),
        "key_rope": t(2, 9, 1, 64),
        "attention_mode": 2,
    }


def fused_grouped(queries: int = 1, **changes: Any) -> Call:
    call: Call = {
        "query": t(2, 4, queries, 128),
        "key": t(2, 2, 40, 128),
        "value": t(2, 2, 40, 128),
        "actual_seq_kvlen": t(2, dtype=INT64),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
    }
    return call | changes


def fused_latent(**changes: Any) -> Call:
    call: Call = {
        "query": t(6, 4, 512),
        "key": t(5, 128, 512),
        "value": t(5, 128, 512),
        "query_rope": t(6, 4, 64),
        "key_rope": t(5, 128, 64),
        "atten_mask": t(2048, 2048, dtype=torch.bool),
        "actual_seq_qlen": t(2, dtype=INT64),
        "actual_seq_kvlen": t(2, dtype=INT64),
        "block_table": t(2, 2, dtype=INT32),
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "input_layout": "TND_NTD",
        "sparse_mode": 3,
        "block_size": 128,
    }
    return call | changes


def fused_expanded(**changes: Any) -> Call:
    call: Call = {
        "query": t(4, 6, 128),
        "key": t(4, 9, 128),
        "value": t(4, 9, 128),
        "query_rope": t(4, 6, 64),
        "key_rope": t(4, 9, 64),
        "atten_mask": t(2048, 2048, dtype=torch.bool),
        "actual_seq_qlen": t(2, dtype=INT64),
        "actual_seq_kvlen": t(2, dtype=INT64),
        "num_query_heads": 4,
        "num_key_value_heads": 4,
        "input_layout": "NTD_TND",
        "sparse_mode": 3,
    }
    return call | changes


def kv_cache(**changes: Any) -> Call:
    call: Call = {
        "kv": t(1, 1, 6, 576),
        "gamma": t(512),
        "cos": t(1, 1, 6, 64),
        "sin": t(1, 1, 6, 64),
        "index": t(6, dtype=INT64),
        "k_cache": t(3, 16, 1, 64),
        "ckv_cache": t(3, 16, 1, 512),
        "cache_mode": "PA_BNSD",
        "is_output_kv": True,
    }
    return call | changes


def grouped(dtype: torch.dtype = BF16, **changes: Any) -> Call:
    call: Call = {
        "x": [t(12, 64, dtype=dtype)],
        "weight": [t(4, 64, 32, dtype=dtype)],
        "group_list": t(4, dtype=INT64),
        "group_type": 0,
        "group_list_type": 1,
        "split_item": 3,
    }
    return call | changes


def finalize(**changes: Any) -> Call:
    call: Call = {
        "expanded_permuted_rows": t(24, 32),
        "skip1": t(6, 32),
        "skip2": t(6, 32),
        "bias": t(16, 32),
        "scales": t(6, 4),
        "expanded_src_to_dst_row": t(24, dtype=INT32),
        "export_for_source_row": t(6, 4, dtype=INT32),
        "drop_pad_mode": 2,
    }
    return call | changes


def routing(**changes: Any) -> Call:
    call: Call = {
        "x": t(6, 32),
        "expert_idx": t(6, 4, dtype=INT32),
        "active_num": 24,
        "expert_num": 16,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 16],
    }
    return call | changes


def dispatch(**changes: Any) -> Call:
    call: Call = {
        "x": t(6, 1024),
        "expert_ids": t(6, 4, dtype=INT32),
        "group_ep": "cannopy.ep.0.1.4",
        "ep_world_size": 4,
        "ep_rank_id": 1,
        "moe_expert_num": 16,
    }
    return call | changes


def combine(**changes: Any) -> Call:
    call: Call = {
        "expand_x": t(96, 1024),
        "expert_ids": t(6, 4, dtype=INT32),
        "assist_info_for_combine": t(96 * 128, dtype=INT32),
        "ep_send_counts": t(16, dtype=INT32),
        "expert_scales": t(6, 4, dtype=FP32),
        "group_ep": "cannopy.ep.0.1.4",
        "ep_world_size": 4,
        "ep_rank_id": 1,
        "moe_expert_num": 16,
    }
    return call | changes


def gating(**changes: Any) -> Call:
    call: Call = {
        "x": t(6, 16, dtype=FP32),
        "k": 4,
        "bias": t(16, dtype=FP32),
        "k_group": 2,
        "group_count": 4,
        "group_select_mode": 1,
        "norm_type": 1,
    }
    return call | changes


def batched(**changes: Any) -> Call:
    call: Call = {
        "input": t(6, 4, 512),
        "weight": t(4, 512, 128),
        "perm_x1": [1, 0, 2],
        "perm_x2": [0, 1, 2],
        "perm_y": [1, 0, 2],
    }
    return call | changes


LEGAL: dict[str, dict[str, Callable[[], Call]]] = {
    "npu_rms_norm": {
        "last axis": lambda: {"input": t(6, 32), "gamma": t(32)},
        "two axes": lambda: {"input": t(6, 4, 32), "gamma": t(4, 32, dtype=FP32)},
    },
    "npu_add_rms_norm": {
        "last axis": lambda: {"x1": t(6, 32), "x2": t(6, 32), "gamma": t(32)},
        "two axes": lambda: {"x1": t(6, 4, 32), "x2": t(6, 4, 32), "gamma": t(4, 32)},
    },
    "npu_attention_update": {
        "two": lambda: {"lse": [t(12, dtype=FP32)] * 2, "local_out": [t(12, 512)] * 2, "update_type": 0},
        "sums": lambda: {"lse": [t(12, dtype=FP32)] * 3, "local_out": [t(12, 64)] * 3, "update_type": 1},
    },
    "npu_swiglu": {"last axis": lambda: {"input": t(6, 32)}},
    "npu_rotary_mul": {
        "bsnd": lambda: {"input": t(1, 6, 8, 64), "r1": t(1, 6, 1, 64), "r2": t(1, 6, 1, 64)},
        "long": lambda: {"input": t(1, 5000, 8, 64), "r1": t(1, 5000, 1, 64), "r2": t(1, 5000, 1, 64)},
        "tn1d": lambda: {"input": t(5000, 8, 1, 64), "r1": t(5000, 1, 1, 64), "r2": t(5000, 1, 1, 64)},
        "tnd": lambda: {"input": t(6, 8, 64), "r1": t(6, 1, 64), "r2": t(6, 1, 64)},
        "rotate": lambda: {
            "input": t(1, 6, 8, 64),
            "r1": t(1, 6, 1, 64),
            "r2": t(1, 6, 1, 64),
            "rotary_mode": "interleave",
            "rotate": t(64, 64),
        },
    },
    "npu_interleave_rope": {
        "one length": lambda: {"x": t(2, 4, 6, 64), "cos": t(2, 1, 6, 64), "sin": t(2, 1, 6, 64)},
    },
    "npu_prefetch": {"plain": lambda: {"input": t(32, 32), "dependency": t(2), "max_size": 2048}},
    "npu_scatter_nd_update": {
        "rows": lambda: {"input": t(32, 8), "indices": t(3, 1, dtype=INT64), "updates": t(3, 8)},
        "points": lambda: {"input": t(4, 5, 6), "indices": t(3, 2, dtype=INT32), "updates": t(3, 6)},
    },
    "npu_transpose_batchmatmul": {
        "transposed": batched,
        "straight": lambda: batched(input=t(4, 6, 512), perm_x1=None),
        "scaled": lambda: batched(scale=t(4 * 128, dtype=INT64)),
    },
    "npu_moe_gating_top_k": {
        "groups": gating,
        "hash": lambda: gating(input_ids=t(6, dtype=INT64), tid2eid=t(100, 4, dtype=INT32)),
    },
    "npu_moe_init_routing_v2": {
        "counts": routing,
        "scale": lambda: routing(scale=t(6, dtype=FP32)),
        "static": lambda: routing(scale=t(1, dtype=FP32), offset=t(1, dtype=FP32), quant_mode=0),
        "key value": lambda: routing(expert_tokens_num_type=2),
        "drop": lambda: routing(drop_pad_mode=1, expert_capacity=5),
    },
    "npu_moe_re_routing": {
        "plain": lambda: {"tokens": t(8, 32), "expert_token_num_per_rank": t(2, 4, dtype=INT64)},
        "scales": lambda: {"tokens": t(8, 32), "expert_token_num_per_rank": t(2, 4, dtype=INT64),
                           "per_token_scales": t(8, dtype=FP32)},
    },
    "npu_moe_distribute_dispatch_v2": {
        "plain": dispatch,
        "wide": lambda: dispatch(comm_alg="fullmesh_v2", tp_world_size=1),
        "copies": lambda: dispatch(copy_expert_num=8, expert_ids=t(6, 12, dtype=INT32)),
    },
    "npu_moe_distribute_combine_v2": {
        "plain": combine,
        "shared": lambda: combine(shared_expert_x=t(6, 1024)),
        "copies": lambda: combine(copy_expert_num=8, ori_x=t(6, 1024)),
    },
    "npu_moe_finalize_routing": {
        "all": finalize,
        "fp32 scales": lambda: finalize(scales=t(6, 4, dtype=FP32)),
        "no scales": lambda: finalize(scales=None, k=4),
        "skip1 only": lambda: finalize(skip2=None),
        "bare": lambda: finalize(skip1=None, skip2=None, bias=None, export_for_source_row=None),
        "drop": lambda: finalize(expanded_permuted_rows=t(16, 3, 32), drop_pad_mode=3),
    },
    "npu_grouped_matmul": {
        "single": grouped,
        "fp16 bias": lambda: grouped(FP16, bias=[t(4, 32, dtype=FP16)]),
        "bf16 bias": lambda: grouped(bias=[t(4, 32, dtype=FP32)]),
        "fp32": lambda: grouped(FP32, output_dtype=6),
        "many weights": lambda: grouped(weight=[t(64, 32) for _ in range(4)]),
        "many x": lambda: grouped(
            x=[t(3, 64) for _ in range(4)], weight=[t(64, 32) for _ in range(4)], group_list=None
        ),
        "ungrouped": lambda: {
            "x": [t(2, 3, 64), t(5, 7, 64)],
            "weight": [t(64, 32), t(64, 16)],
            "group_type": -1,
            "split_item": 0,
        },
    },
    "npu_lightning_indexer": {"paged": indexer_paged, "bsnd": indexer_bsnd, "tnd": indexer_tnd},
    "npu_sparse_flash_attention": {"paged": attention_paged, "bsnd": attention_bsnd, "tnd": attention_tnd},
    "npu_kv_rmsnorm_rope_cache_v2_functional": {"packed": kv_cache},
    "npu_fused_infer_attention_score_v2": {
        "grouped": fused_grouped,
        "latent": fused_latent,
        "expanded": fused_expanded,
    },
    "npu_mla_prolog_v3": {
        "paged": prolog,
        "batched": lambda: prolog((2, 3)),
        "half quantised": lambda: prolog(weight_quant_mode=1, weight_uq_qr=t(1536, 768, dtype=INT8)),
        "quantised": prolog_int8,
        "blocks": lambda: prolog(
            cache_mode="PA_BLK_BSND", cache_index=t(1, dtype=INT64), actual_seq_len=t(1, dtype=INT32)
        ),
        "blocks batched": lambda: prolog((2, 3), cache_mode="PA_BLK_NZ", cache_index=t(2, 1, dtype=INT64)),
        "tnd": lambda: prolog(cache_mode="TND", kv_cache=t(6, 1, 512), kr_cache=t(6, 1, 64), cache_index=None),
        "bsnd": lambda: prolog(
            (2, 3), cache_mode="BSND", kv_cache=t(2, 3, 1, 512), kr_cache=t(2, 3, 1, 64), cache_index=None
        ),
    },
}
