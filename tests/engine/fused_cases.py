"""Calls of the npu ops that lower to fused GE types, at sizes that the ops' contracts allow.

The oracle is the same function run eagerly on the CPU kernels: what is under test is that torchair's lowering and
the engine hand every input and attribute back to the op that it came from. Attributes are given values that are not
the defaults where the op allows it, so that one that is dropped or swapped changes the result or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
npu = torch.ops.npu


def _r(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@dataclass(frozen=True)
class FusedCase:
    """``mutates``: positions of the inputs that the call writes."""

    ge_type: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]
    mutates: tuple[int, ...] = ()
    name: str = ""

    @property
    def id(self) -> str:
        """The test's name."""
        return self.name or self.ge_type


def _prolog_inputs() -> tuple[Tensor, ...]:
    tokens, hidden, q_rank, heads, rope = 3, 1024, 1536, 4, 64
    return (
        _r(tokens, hidden),
        _r(hidden, q_rank, scale=0.03),
        _r(q_rank, heads * (128 + rope), scale=0.03),
        _r(heads, 128, 512, scale=0.05),
        _r(hidden, 512 + rope, scale=0.03),
        1 + _r(q_rank, scale=0.1),
        1 + _r(512, scale=0.1),
        _r(tokens, rope).clamp(-1, 1),
        _r(tokens, rope).clamp(-1, 1),
        _r(2, 128, 1, 512),
        _r(2, 128, 1, rope),
        torch.tensor([7, 130, 131]),
    )


def _prolog(*a: Tensor) -> Any:
    *weights, kv, kr, index = a
    q, q_rope, _, q_norm, _, new_kv, new_kr = npu.npu_mla_prolog_v3_functional(
        *weights, kv, kr, cache_index=index, rmsnorm_epsilon_cq=3e-3, rmsnorm_epsilon_ckv=2e-2,
        cache_mode="PA_BSND", query_norm_flag=True,
    )  # fmt: skip
    kv.copy_(new_kv)
    kr.copy_(new_kr)
    return q, q_rope, q_norm, new_kv.sum(), new_kr.sum()


def _indexer_inputs() -> tuple[Tensor, ...]:
    return (
        _r(6, 8, 128), _r(4, 128, 1, 128), _r(6, 8).abs(),
        torch.tensor([2, 6], dtype=torch.int32), torch.tensor([200, 256], dtype=torch.int32),
        torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
    )  # fmt: skip


def _indexer(q: Tensor, k: Tensor, w: Tensor, lq: Tensor, lk: Tensor, table: Tensor) -> Any:
    return npu.npu_lightning_indexer(
        q, k, w, actual_seq_lengths_query=lq, actual_seq_lengths_key=lk, block_table=table,
        layout_query="TND", layout_key="PA_BSND", sparse_count=64, sparse_mode=3,
    )[0]  # fmt: skip


def _attention_inputs() -> tuple[Tensor, ...]:
    indices = torch.stack([torch.randperm(150)[:64] for _ in range(6)]).view(6, 1, 64).to(torch.int32)
    return (
        _r(6, 4, 512), _r(4, 128, 1, 512), indices, torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        torch.tensor([2, 6], dtype=torch.int32), torch.tensor([200, 256], dtype=torch.int32),
        _r(6, 4, 64), _r(4, 128, 1, 64),
    )  # fmt: skip


def _attention(q: Tensor, kv: Tensor, i: Tensor, table: Tensor, lq: Tensor, lk: Tensor, qr: Tensor, kr: Tensor) -> Any:
    return npu.npu_sparse_flash_attention(
        q, kv, kv, i, 0.07, block_table=table, actual_seq_lengths_query=lq, actual_seq_lengths_kv=lk,
        query_rope=qr, key_rope=kr, sparse_block_size=1, layout_query="TND", layout_kv="PA_BSND",
        sparse_mode=3, attention_mode=2,
    )[0]  # fmt: skip


def _dense_inputs() -> tuple[Tensor, ...]:
    return (_r(6, 4, 512), _r(4, 128, 512), torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([2, 6]),
            torch.tensor([200, 256]), _r(6, 4, 64), _r(4, 128, 64))


def _dense(q: Tensor, kv: Tensor, table: Tensor, lq: Tensor, lk: Tensor, qr: Tensor, kr: Tensor) -> Any:
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    return torch.ops.air.npu_fused_infer_attention_score_v2(
        q, kv, kv, query_rope=qr, key_rope=kr, atten_mask=mask, actual_seq_qlen=lq, actual_seq_kvlen=lk,
        block_table=table, num_query_heads=4, num_key_value_heads=1, softmax_scale=0.07, input_layout="TND_NTD",
        sparse_mode=3, block_size=128,
    )[0]  # fmt: skip


def _dense_apart(q: Tensor, kv: Tensor, table: Tensor, lq: Tensor, lk: Tensor, qr: Tensor, kr: Tensor) -> Any:
    return torch.ops.air.npu_fused_infer_attention_score_v2(
        q, kv, kv, query_rope=qr, key_rope=kr, actual_seq_qlen=torch.arange(1, 7), actual_seq_kvlen=lk.repeat(3),
        block_table=table.repeat(3, 1), num_query_heads=4, num_key_value_heads=1, softmax_scale=0.07,
        input_layout="TND_NTD", block_size=128, return_softmax_lse=True,
    )  # fmt: skip


def _dense_grouped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
    return torch.ops.air.npu_fused_infer_attention_score_v2(
        q, k, v, actual_seq_kvlen=lengths, num_query_heads=4, num_key_value_heads=2, softmax_scale=0.07,
        input_layout="BNSD",
    )[0]  # fmt: skip


def _gating(x: Tensor, bias: Tensor) -> Any:
    y, index, _ = npu.npu_moe_gating_top_k(
        x, 4, bias=bias, k_group=2, group_count=4, group_select_mode=1, renorm=0, norm_type=1,
        routed_scaling_factor=2.5, eps=1e-3,
    )  # fmt: skip
    return y, index


def _init_routing(x: Tensor, index: Tensor) -> Any:
    rows, row_idx, counts, _ = npu.npu_moe_init_routing_v2(
        x, index, active_num=12, expert_num=8, drop_pad_mode=0, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, 8], row_idx_type=0,
    )  # fmt: skip
    return rows, row_idx, counts


def _routed() -> tuple[Tensor, ...]:
    return _r(6, 64), torch.stack([torch.randperm(8)[:2] for _ in range(6)]).to(torch.int32)


def _grouped(x: Tensor, w: Tensor, counts: Tensor) -> Any:
    return npu.npu_grouped_matmul([x], [w], group_list=counts, split_item=3, group_type=0, group_list_type=1)


def _grouped_transposed(x: Tensor, w: Tensor, counts: Tensor) -> Any:
    return npu.npu_grouped_matmul([x], [w.mT], group_list=counts, split_item=3, group_type=0, group_list_type=1)


def _grouped_cumulative(x: Tensor, w: Tensor, counts: Tensor) -> Any:
    return npu.npu_grouped_matmul([x], [w], group_list=counts, split_item=3, group_type=0, group_list_type=0)


def _finalize(rows: Tensor, skip: Tensor, scales: Tensor, row_idx: Tensor) -> Any:
    return npu.npu_moe_finalize_routing(rows, skip, None, None, scales, row_idx, None, drop_pad_mode=2)


def _finalize_inputs() -> tuple[Tensor, ...]:
    return _r(12, 32), _r(6, 32), _r(6, 2), torch.randperm(12).to(torch.int32)


def _scatter(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    new = npu.npu_scatter_nd_update(cache, index, rows)
    cache.copy_(new)
    return new.sum(0)


def _counts() -> Tensor:
    return torch.tensor([3, 0, 5, 4])


def _kv_cache_inputs() -> tuple[Tensor, ...]:
    return (_r(1, 1, 3, 576), 1 + _r(512, scale=0.1), *_angles(1, 1, 3, 64), torch.tensor([7, 17, 18]),
            _r(2, 16, 1, 64), _r(2, 16, 1, 512))


def _kv_cache(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, kr: Tensor, ckv: Tensor) -> Any:
    rope, latent, new_kr, new_ckv = npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv, gamma, cos, sin, index, kr, ckv, epsilon=3e-3, cache_mode="PA_BNSD", is_output_kv=True,
    )  # fmt: skip
    kr.copy_(new_kr)
    ckv.copy_(new_ckv)
    return rope, latent, new_kr.sum(), new_ckv.sum()


FUSED: list[FusedCase] = [
    FusedCase("RmsNorm", lambda x, g: npu.npu_rms_norm(x, g, 0.25), lambda: (_r(3, 64), _r(64))),
    FusedCase(
        "AddRmsNorm", lambda a, b, g: npu.npu_add_rms_norm(a, b, g, 0.25), lambda: (_r(3, 64), _r(3, 64), _r(64))
    ),
    FusedCase("SwiGlu", lambda x: npu.npu_swiglu(x, 1), lambda: (_r(3, 8, 4),)),
    FusedCase(
        "RotaryMul", lambda x, c, s: npu.npu_rotary_mul(x, c, s), lambda: (_r(1, 3, 4, 64), *_angles(1, 3, 1, 64))
    ),
    FusedCase(
        "InterleaveRope",
        lambda x, c, s: npu.npu_interleave_rope(x, c, s),
        lambda: (_r(2, 4, 3, 64), *_angles(2, 1, 3, 64)),
    ),
    FusedCase(
        "TransposeBatchMatMul",
        lambda x, w: npu.npu_transpose_batchmatmul(x, w, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]),
        lambda: (_r(3, 4, 512), _r(4, 512, 128)),
    ),
    FusedCase("MoeGatingTopK", _gating, lambda: (_r(6, 16, dtype=torch.float32), _r(16, dtype=torch.float32))),
    FusedCase("MoeInitRoutingV3", _init_routing, _routed),
    FusedCase("GroupedMatmul", _grouped, lambda: (_r(12, 64), _r(4, 64, 32), _counts())),
    FusedCase(
        "GroupedMatmul", _grouped_transposed, lambda: (_r(12, 64), _r(4, 32, 64), _counts()), name="GroupedMatmul-mT"
    ),
    FusedCase(
        "GroupedMatmul",
        _grouped_cumulative,
        lambda: (_r(12, 64), _r(4, 64, 32), _counts().cumsum(0)),
        name="GroupedMatmul-cumulative",
    ),
    FusedCase("MoeFinalizeRoutingV2", _finalize, _finalize_inputs),
    FusedCase("LightningIndexer", _indexer, _indexer_inputs),
    FusedCase("SparseFlashAttention", _attention, _attention_inputs),
    FusedCase("FusedInferAttentionScore", _dense, _dense_inputs, name="FusedInferAttentionScore-latent"),
    FusedCase(
        "FusedInferAttentionScore", _dense_grouped,
        lambda: (_r(2, 4, 1, 32), _r(2, 2, 9, 32), _r(2, 2, 9, 32), torch.tensor([9, 4])),
        name="FusedInferAttentionScore-grouped",
    ),
    FusedCase("FusedInferAttentionScore", _dense_apart, _dense_inputs, name="FusedInferAttentionScore-lse"),
    FusedCase("AttentionUpdate", lambda *a: npu.npu_attention_update(a[:3], a[3:], 1),
              lambda: (*(_r(6, dtype=torch.float32) for _ in range(3)), *(_r(6, 64) for _ in range(3)))),
    FusedCase("KvRmsNormRopeCache", _kv_cache, _kv_cache_inputs, mutates=(5, 6)),
    FusedCase("MlaPrologV3", _prolog, _prolog_inputs, mutates=(9, 10)),
    FusedCase("ScatterNdUpdate", _scatter, lambda: (_r(8, 16), torch.tensor([[5], [1]]), _r(2, 16)), mutates=(0,)),
]


def _angles(*shape: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(shape)
    return angle.cos().to(BF16), angle.sin().to(BF16)
