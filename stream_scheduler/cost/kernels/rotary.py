"""Rotary position embedding, alone and fused with the norm and cache write of the latent."""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_SIZES, (_R, _H, _D) = sizes("rows: tokens", "heads: heads", "dim: rotated elements of a head")
_INTER, (_IR, _IH, _ID) = sizes("rows: tokens", "heads=1: heads", "dim=64: rotated elements of a head")
_KV, (_T, _RANK, _ROPE, _C) = sizes(
    "tokens: tokens on this die",
    "rank=512: rank of the latent",
    "rope=64: rotary part",
    "cache_bytes=2: bytes an element of the cache",
)

KERNELS = (
    Kernel(
        "rotary",
        "rows_rotary",
        "x cos + rotate(x) sin",
        _SIZES,
        "op-plugin documentation of npu_rotary_mul; BF16 in and out, cos and sin of each token",
        read={Role.ACTIVATIONS: _R * (_H + 2) * _D * 2},
        write={Role.ACTIVATIONS: _R * _H * _D * 2},
        vector_ops=4 * _R * _H * _D,
        counts={"rows": _R},
        contract="npu_rotary_mul",
    ),
    Kernel(
        "interleave_rope",
        "rows_rotary",
        "rotary embedding of interleaved pairs",
        _INTER,
        "op-plugin documentation of npu_interleave_rope; BF16 in and out, cos and sin of each token",
        read={Role.ACTIVATIONS: _IR * (_IH + 2) * _ID * 2},
        write={Role.ACTIVATIONS: _IR * _IH * _ID * 2},
        vector_ops=4 * _IR * _IH * _ID,
        counts={"rows": _IR},
        contract="npu_interleave_rope",
    ),
    Kernel(
        "kv_rmsnorm_rope_cache",
        "rows_cache",
        "norm of the latent, rotary of its rope part, write to the cache",
        _KV,
        "op-plugin documentation of npu_kv_rmsnorm_rope_cache",
        read={Role.ACTIVATIONS: _T * (_RANK + 3 * _ROPE) * 2},
        write={Role.CACHE: _T * (_RANK + _ROPE) * _C},
        vector_ops=_T * (4 * _RANK + 4 * _ROPE),
        counts={"rows": _T},
        contract="npu_kv_rmsnorm_rope_cache_v2_functional",
    ),
)
