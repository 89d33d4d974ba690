"""Lightning indexer: score every cached key for every query token and keep the best.

index[t] = top-k over s of sum over h of w[t, h] relu(q[t, h] . k[s]). Keys are read once per sequence; scoring is
B q H S D MACs, ReLU and the weighted sum two lane operations per head and key. Selecting passes over all S keys of a
row and over the k kept ones; the law has its cycles.
"""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "op-plugin documentation of npu_lightning_indexer"

_SIZES, (_B, _Q, _S, _H, _D, _E, _TOPK) = sizes(
    "batch: sequences on this die",
    "q_tokens: query tokens per sequence",
    "context: cached tokens per sequence",
    "heads=64: heads of the indexer",
    "dim=128: size of a head",
    "key_bytes=2: bytes an element of the key cache",
    "selected=2048: keys kept per query token",
)
_ROWS = _B * _Q


def _indexer(name: str, dtype: str) -> Kernel:
    return Kernel(
        name,
        "lightning_indexer",
        f"scores of all cached keys and their top-k, products in {dtype.upper()}",
        _SIZES,
        SOURCE,
        read={Role.CACHE: _B * _S * _D * _E, Role.ACTIVATIONS: _ROWS * _H * (_D * _E + 2)},
        write={Role.ACTIVATIONS: _ROWS * _TOPK * 4},
        macs=_ROWS * _H * _S * _D,
        mac_dtype=dtype,
        vector_ops=2 * _ROWS * _H * _S,
        counts={
            "tasks": _ROWS,
            "searched": _ROWS * _S,
            "kept": _ROWS * _TOPK,
            "qk_macs": _ROWS * _H * _S * _D,
            "scores": _ROWS * _H * _S,
        },
        cube=True,
        contract="npu_lightning_indexer",
    )


KERNELS = (_indexer("lightning_indexer", "bf16"), _indexer("lightning_indexer_int8", "int8"))
