"""Fused infer attention: absorbed MLA and GQA for decode, causal attention for prefill.

Decode, absorbed MLA: QK is B q H S (R + P) MACs and PV B q H S R; the latent cache of B S (R + P) elements is read
once for all heads. Decode, GQA: 2 B q H S D MACs and 2 B S G D elements of cache. Prefill: QK and PV over the
causal half, S^2 / 2 pairs. Softmax is counted as eight lane operations per score.
"""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "op-plugin documentation of npu_fused_infer_attention_score"

_MLA, (_B, _Q, _S, _H, _R, _P, _C) = sizes(
    "batch: sequences on this die",
    "q_tokens: query tokens per sequence",
    "context: cached tokens per sequence",
    "heads: query heads on this die",
    "rank=512: rank of the latent",
    "rope=64: rotary part of a head",
    "cache_bytes=2: bytes an element of the cache",
)


def _mla(name: str, dtype: str) -> Kernel:
    return Kernel(
        name,
        "attention_decode",
        f"absorbed MLA over the whole latent cache, products in {dtype.upper()}",
        _MLA,
        SOURCE,
        read={Role.CACHE: _B * _S * (_R + _P) * _C, Role.ACTIVATIONS: _B * _Q * _H * (_R + _P) * 2},
        write={Role.ACTIVATIONS: _B * _Q * _H * _R * 2},
        macs=_B * _Q * _H * _S * (2 * _R + _P),
        mac_dtype=dtype,
        vector_ops=8 * _B * _Q * _H * _S,
        counts={"sequences": _B, "qk_macs": _B * _Q * _H * _S * (_R + _P), "scores": _B * _Q * _H * _S},
        cube=True,
        contract="npu_fused_infer_attention_score_v2",
    )


_GQA, (_GB, _GQ, _GS, _GH, _GK, _GD, _GC) = sizes(
    "batch: sequences on this die",
    "q_tokens: query tokens per sequence",
    "context: cached tokens per sequence",
    "heads: query heads on this die",
    "kv_heads: key and value heads on this die",
    "dim=128: size of a head",
    "cache_bytes=2: bytes an element of the cache",
)
GQA = Kernel(
    "fused_infer_attention_gqa",
    "attention_gqa",
    "grouped-query attention over the whole cache",
    _GQA,
    SOURCE,
    read={Role.CACHE: 2 * _GB * _GS * _GK * _GD * _GC, Role.ACTIVATIONS: _GB * _GQ * _GH * _GD * 2},
    write={Role.ACTIVATIONS: _GB * _GQ * _GH * _GD * 2},
    macs=2 * _GB * _GQ * _GH * _GS * _GD,
    vector_ops=8 * _GB * _GQ * _GH * _GS,
    counts={"sequences": _GB},
    cube=True,
    contract="npu_fused_infer_attention_score_v2",
)

_PRE, (_PB, _PT, _PH, _PK, _PD, _PV) = sizes(
    "batch: sequences",
    "tokens: tokens of each sequence",
    "heads: query heads on this die",
    "kv_heads: key and value heads on this die",
    "dim=192: size of a query and key head",
    "value_dim=128: size of a value head",
)
PREFILL = Kernel(
    "fused_infer_attention_prefill",
    "attention_prefill",
    "causal attention of whole sequences",
    _PRE,
    SOURCE,
    read={Role.ACTIVATIONS: _PB * _PT * (_PH * _PD + _PK * (_PD + _PV)) * 2},
    write={Role.ACTIVATIONS: _PB * _PT * _PH * _PV * 2},
    macs=_PB * _PH * _PT**2 / 2 * (_PD + _PV),
    vector_ops=8 * _PB * _PH * _PT**2 / 2,
    counts={"query_heads": _PB * _PT * _PH},
    cube=True,
)

KERNELS = (
    _mla("fused_infer_attention_mla", "bf16"),
    _mla("fused_infer_attention_mla_int8", "int8"),
    GQA,
    PREFILL,
)
