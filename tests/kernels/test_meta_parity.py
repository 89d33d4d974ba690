"""Shapes and dtypes of the kernels' results are those of torch_npu's meta functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests.contracts.calls import (
    INT32,
    LEGAL,
    attention_paged,
    finalize,
    gating,
    grouped,
    indexer_paged,
    prolog,
    routing,
    t,
)
from tests.features import needs_argument

HOST_REFUSES = {
    ("npu_rotary_mul", "rotate"),
    ("npu_rotary_mul", "long"),
    ("npu_rotary_mul", "tn1d"),
    ("npu_transpose_batchmatmul", "scaled"),
    ("npu_moe_gating_top_k", "hash"),
    ("npu_moe_init_routing_v2", "static"),
    ("npu_moe_init_routing_v2", "drop"),
    ("npu_mla_prolog_v3", "half quantised"),
    ("npu_mla_prolog_v3", "quantised"),
    *(("npu_moe_distribute_dispatch_v2", variant) for variant in LEGAL["npu_moe_distribute_dispatch_v2"]),
    *(("npu_moe_distribute_combine_v2", variant) for variant in LEGAL["npu_moe_distribute_combine_v2"]),
    *(("npu_fused_infer_attention_score_v2", variant) for variant in LEGAL["npu_fused_infer_attention_score_v2"]),
}
"""Legal calls that the CPU kernel does not compute, and two that are merely large. Dispatch and combine run
between processes, see tests/parallel/test_exchange.py. Fused attention is called with tensors for lengths, which
torch_npu's own op does not take; its shapes are checked in its own tests."""


def real(op: str, name: str, value: Any) -> Any:
    """A tensor on the CPU that is valid for argument `name`: contents 0 or 1 fit every index and length used here."""
    if isinstance(value, list):
        return [real(op, name, item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.bfloat16 or value.dtype.is_floating_point:
        return torch.randn(value.shape).to(value.dtype)
    if name in ("actual_seq_lengths_query", "actual_seq_lengths_key", "actual_seq_lengths_kv", "actual_seq_len"):
        return torch.full(value.shape, 1 if "query" in name or "kv" in name or "key" in name else 6, dtype=value.dtype)
    if name == "expert_token_num_per_rank":
        return torch.ones(value.shape, dtype=value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


def compare(op: str, call: dict[str, Any]) -> None:
    function = getattr(torch.ops.npu, op)
    on_cpu = {name: real(op, name, value) for name, value in call.items()}
    if on_cpu.get("value") is not None and "sparse_indices" in on_cpu:
        on_cpu["value"] = on_cpu["key"]
    on_meta = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), on_cpu)
    results = pytree.tree_leaves(function(**on_cpu))
    wanted = pytree.tree_leaves(function(**on_meta))
    assert [(tuple(r.shape), r.dtype) for r in results if r is not None] == [
        (tuple(w.shape), w.dtype) for w in wanted if w is not None
    ]
    assert all(r.is_contiguous() for r in results if r is not None)


CALLS = [
    (op, variant, call)
    for op, variants in LEGAL.items()
    for variant, call in variants.items()
    if (op, variant) not in HOST_REFUSES
]


@pytest.mark.parametrize(("op", "variant", "call"), CALLS, ids=[f"{op}-{variant}" for op, variant, _ in CALLS])
def test_legal_variants(op: str, variant: str, call: Callable[[], dict[str, Any]]) -> None:
    arguments = call()
    needs_argument(op, *arguments)
    compare(op, arguments)


def tokens_of(op: str, tokens: int) -> dict[str, Any]:
    """The main form of `op` with a given number of tokens."""
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "npu_rms_norm": lambda: {"input": t(tokens, 32), "gamma": t(32)},
        "npu_add_rms_norm": lambda: {"x1": t(tokens, 32), "x2": t(tokens, 32), "gamma": t(32)},
        "npu_swiglu": lambda: {"input": t(tokens, 32)},
        "npu_rotary_mul": lambda: {"input": t(1, tokens, 8, 64), "r1": t(1, tokens, 1, 64), "r2": t(1, tokens, 1, 64)},
        "npu_moe_gating_top_k": lambda: gating(x=t(tokens, 16, dtype=torch.float32)),
        "npu_moe_init_routing_v2": lambda: routing(
            x=t(tokens, 32), expert_idx=t(tokens, 4, dtype=INT32), active_num=tokens * 4
        ),
        "npu_moe_finalize_routing": lambda: finalize(
            expanded_permuted_rows=t(tokens * 4, 32),
            skip1=t(tokens, 32),
            skip2=None,
            scales=t(tokens, 4),
            expanded_src_to_dst_row=t(tokens * 4, dtype=INT32),
            export_for_source_row=t(tokens, 4, dtype=INT32),
        ),
        "npu_grouped_matmul": lambda: grouped(x=[t(tokens, 64)]),
        "npu_mla_prolog_v3": lambda: prolog((tokens,)),
        "npu_mla_prolog_v3_functional": lambda: prolog((tokens,)),
        "npu_lightning_indexer": lambda: indexer_paged(query=t(tokens, 8, 128), weights=t(tokens, 8)),
        "npu_sparse_flash_attention": lambda: attention_paged(
            query=t(tokens, 4, 512), query_rope=t(tokens, 4, 64), sparse_indices=t(tokens, 1, 16, dtype=INT32)
        ),
    }
    return table[op]()


EMPTY_REFUSED = ("npu_lightning_indexer", "npu_sparse_flash_attention")
OPS = (
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_moe_finalize_routing",
    "npu_grouped_matmul",
    "npu_mla_prolog_v3",
    "npu_mla_prolog_v3_functional",
    *EMPTY_REFUSED,
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_token_counts(op: str, tokens: int) -> None:
    if tokens == 0 and op in EMPTY_REFUSED:
        with pytest.raises(ValueError, match="query-not-empty"):
            compare(op, tokens_of(op, tokens))
    else:
        compare(op, tokens_of(op, tokens))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_optional_outputs_of_routing(flag: bool, kind: int) -> None:
    compare("npu_moe_init_routing_v2", routing(expert_tokens_num_flag=flag, expert_tokens_num_type=kind))


@pytest.mark.parametrize("out_flag", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_optional_outputs_of_gating(out_flag: bool, dtype: torch.dtype) -> None:
    compare("npu_moe_gating_top_k", gating(x=t(6, 16, dtype=dtype), bias=t(16, dtype=dtype), out_flag=out_flag))


@pytest.mark.parametrize("recent_cann", [True, False])
@pytest.mark.parametrize("query_norm_flag", [True, False])
def test_placeholders_of_the_prolog(monkeypatch: pytest.MonkeyPatch, recent_cann: bool, query_norm_flag: bool) -> None:
    import torch_npu

    monkeypatch.setattr(torch_npu.npu.utils, "_is_gte_cann_version", lambda *_: recent_cann)
    compare("npu_mla_prolog_v3", prolog(query_norm_flag=query_norm_flag))


def test_scatter_keeps_the_type_of_its_target() -> None:
    for dtype in (torch.bool, torch.int8, torch.int64, torch.float16):
        target = torch.zeros(5, 3, dtype=dtype)
        rows = torch.ones(2, 3, dtype=dtype)
        out = torch.ops.npu.npu_scatter_nd_update(target, torch.tensor([[0], [4]]), rows)
        assert out.dtype == dtype
        assert out.sum() == 6
