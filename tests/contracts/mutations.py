"""One-argument changes to a legal call, for finding out whether each clause can refuse something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.contracts.calls import FP32, INT64, Call, attention_paged, batched, gating, grouped, prolog, t

DTYPES = (torch.float64, torch.int32, torch.int16, torch.float16, torch.bfloat16, torch.float32)
LISTS: tuple[list[int], ...] = ([0], [5, 5], [0, 99], [2, 1, 0], [0, 2, 1])
PLAIN: dict[str, tuple[Any, ...]] = {
    "int": (-5, -1, 0, 1, 2, 3, 7, 99, 6000, 20000),
    "bool": (True, False),
    "float": (2.0,),
    "str": ("BOGUS", "BSND", "TND"),
    "List[int]": LISTS,
}


def changes(op: str, call: Call, argument: str) -> Iterator[Call]:
    """Calls that differ from `call` in `argument` only, by values of the type that the op's schema gives it."""
    (kind,) = (str(a.type) for a in getattr(torch.ops.npu, op).default._schema.arguments if a.name == argument)
    for other in _values(kind, call.get(argument)):
        yield call | {argument: other}


def _values(kind: str, value: Any) -> Iterator[Any]:
    if kind.startswith("Optional["):
        yield from _values(kind[len("Optional[") : -1], value)
        yield None
    elif kind == "Tensor":
        yield from [t(2, 2, dtype=torch.float64)] if value is None else _tensors(value)
    elif kind == "List[Tensor]":
        tensors = value or [t(2, 2)]
        yield tensors * 130
        yield tensors[:1]
        yield []
        for other in _tensors(tensors[0]):
            yield [other, *tensors[1:]]
    else:
        yield from PLAIN[kind]


def _tensors(value: torch.Tensor) -> Iterator[torch.Tensor]:
    shape = list(value.shape)
    for dtype in DTYPES:
        yield t(*shape, dtype=dtype)
    for axis, size in enumerate(shape):
        for new in (size + 1, 0, 1, size * 1000 + 1, 70000, 131072):
            yield t(*shape[:axis], new, *shape[axis + 1 :], dtype=value.dtype)
        yield t(*shape[:axis], *shape[axis + 1 :], dtype=value.dtype)
    yield t(*shape, 1, dtype=value.dtype)
    yield t(1, 1, 1, 1, 1, 1, 1, 1, *shape, dtype=value.dtype)
    if len(shape) > 1:
        yield t(shape[1], shape[0], *shape[2:], dtype=value.dtype).transpose(0, 1)


CRAFTED: dict[tuple[str, str], Call] = {
    ("npu_transpose_batchmatmul", "batch-range"): batched(input=t(2, 70000, 16), weight=t(70000, 16, 16)),
    ("npu_transpose_batchmatmul", "kb-range"): batched(input=t(2, 128, 512), weight=t(128, 512, 128)),
    ("npu_transpose_batchmatmul", "k-range"): batched(input=t(4, 6, 65552), weight=t(4, 65552, 16), perm_x1=None),
    ("npu_transpose_batchmatmul", "k-multiple"): batched(input=t(6, 4, 500), weight=t(4, 500, 128)),
    ("npu_transpose_batchmatmul", "input-last-axis"): batched(
        input=t(4, 6, 65552), weight=t(4, 65552, 16), perm_x1=None
    ),
    ("npu_transpose_batchmatmul", "scale-range"): batched(
        input=t(6, 64, 16), weight=t(64, 16, 1024), scale=t(65536, dtype=INT64)
    ),
    ("npu_transpose_batchmatmul", "split-with-scale"): batched(scale=t(512, dtype=INT64), batch_split_factor=2),
    ("npu_moe_gating_top_k", "experts-max"): gating(x=t(6, 4096, dtype=FP32), bias=t(4096, dtype=FP32)),
    ("npu_moe_gating_top_k", "group-size"): gating(x=t(6, 8, dtype=FP32), bias=t(8, dtype=FP32)),
    ("npu_moe_gating_top_k", "aligned-groups"): gating(
        x=t(6, 400, dtype=FP32), bias=t(400, dtype=FP32), group_count=100
    ),
    ("npu_lightning_indexer", "heads-max"): {
        "query": t(2, 3, 65, 128),
        "key": t(2, 9, 1, 128),
        "weights": t(2, 3, 65),
    },
    ("npu_sparse_flash_attention", "sparse-block-divides"): attention_paged(
        key=t(4, 16, 1, 512), value=t(4, 16, 1, 512), key_rope=t(4, 16, 1, 64), sparse_block_size=32
    ),
    ("npu_sparse_flash_attention", "sparse-block-max"): attention_paged(sparse_block_size=256),
    ("npu_sparse_flash_attention", "heads"): attention_paged(query=t(6, 3, 512), query_rope=t(6, 3, 64)),
    ("npu_mla_prolog_v3", "heads"): prolog(heads=3),
    ("npu_mla_prolog_v3", "hidden-size"): prolog(
        token_x=t(6, 1000), weight_dq=t(1000, 1536), weight_dkv_kr=t(1000, 576)
    ),
    ("npu_mla_prolog_v3", "q-rank"): prolog(
        weight_dq=t(1024, 1000), weight_uq_qr=t(1000, 768), rmsnorm_gamma_cq=t(1000)
    ),
    ("npu_mla_prolog_v3", "nope-dim"): prolog(weight_uk=t(4, 64, 512), weight_uq_qr=t(1536, 4 * 128)),
    ("npu_mla_prolog_v3", "quant-triple-0"): prolog(kv_cache_quant_mode=1),
    ("npu_mla_prolog_v3", "batch-max"): prolog((70000, 1)),
    ("npu_mla_prolog_v3", "cache-mode-bsnd"): prolog(
        cache_mode="BSND", kv_cache=t(6, 1, 512), kr_cache=t(6, 1, 64), cache_index=None
    ),
    ("npu_mla_prolog_v3", "cache-mode-tnd"): prolog((2, 3), cache_mode="TND", cache_index=None),
    ("npu_grouped_matmul", "fp32-single"): grouped(FP32, weight=[t(64, 32, dtype=FP32) for _ in range(4)]),
    ("npu_grouped_matmul", "group-list-given"): grouped(group_list=None),
    ("npu_grouped_matmul", "groups-max"): grouped(weight=[t(2000, 64, 32)], group_list=t(2000, dtype=INT64)),
    ("npu_grouped_matmul", "inner-limit-x"): grouped(x=[t(12, 65536)], weight=[t(4, 65536, 32)]),
    ("npu_grouped_matmul", "inner-limit-weight"): grouped(weight=[t(4, 64, 65536)]),
    ("npu_grouped_matmul", "x-per-group"): grouped(
        x=[t(3, 64)] * 3, weight=[t(64, 32)] * 4, group_list=t(4, dtype=INT64)
    ),
    ("npu_grouped_matmul", "many-weights-rank"): grouped(weight=[t(4, 64, 32)] * 4),
    ("npu_grouped_matmul", "single-weight-rank"): grouped(weight=[t(64, 32)], group_list=t(1, dtype=INT64)),
    ("npu_grouped_matmul", "host-antiquant"): grouped(antiquant_scale=[t(4, 32)]),
    ("npu_rotary_mul", "head-dim-even"): {
        "input": t(1, 6, 8, 63),
        "r1": t(1, 6, 1, 63),
        "r2": t(1, 6, 1, 63),
    },
    ("npu_rotary_mul", "head-dim-max"): {
        "input": t(1, 6, 8, 896),
        "r1": t(1, 6, 1, 896),
        "r2": t(1, 6, 1, 896),
    },
    ("npu_rotary_mul", "head-dim-max-950"): {
        "input": t(1, 6, 8, 1026),
        "r1": t(1, 6, 1, 1026),
        "r2": t(1, 6, 1, 1026),
    },
}
"""Calls for clauses that no change of a single argument reaches without breaking another one first."""
