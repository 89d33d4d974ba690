"""Sparse flash attention over the selected tokens of a latent cache.

Each query token reads its own ``selected`` rows of R + P elements, without reuse between the tokens of a
sequence: B q K (R + P) bytes times the element. QK is B q H K (R + P) MACs, PV is B q H K R.
"""

from __future__ import annotations

import sympy

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "op-plugin documentation of npu_sparse_flash_attention"

_SIZES, (_B, _Q, _S, _H, _TOPK, _R, _P, _C) = sizes(
    "batch: sequences on this die",
    "q_tokens: query tokens per sequence",
    "context: cached tokens per sequence",
    "heads: query heads on this die",
    "selected=2048: tokens that a query token attends to",
    "rank=512: rank of the latent",
    "rope=64: rotary part of a head",
    "cache_bytes=2: bytes an element of the cache",
)
_ROWS = _B * _Q
_KEYS = sympy.Min(_TOPK, _S)

SPARSE_FLASH_ATTENTION = Kernel(
    "sparse_flash_attention",
    "sparse_attention",
    "absorbed MLA over the tokens that the indexer selected",
    _SIZES,
    SOURCE,
    read={
        Role.CACHE: _ROWS * _KEYS * (_R + _P) * _C,
        Role.ACTIVATIONS: _ROWS * (_H * (_R + _P) * 2 + _KEYS * 4),
    },
    write={Role.ACTIVATIONS: _ROWS * _H * _R * 2},
    macs=_ROWS * _H * _KEYS * (2 * _R + _P),
    vector_ops=8 * _ROWS * _H * _KEYS,
    counts={
        "gathered": _ROWS * _KEYS,
        "qk_macs": _ROWS * _H * _KEYS * (_R + _P),
        "scores": _ROWS * _H * _KEYS,
    },
    cube=True,
    contract="npu_sparse_flash_attention",
)

KERNELS = (SPARSE_FLASH_ATTENTION,)
