"""Vector kernels that treat each row by itself: norms, softmax, SwiGLU, top-k, reductions.

Bytes are rows read and written once; the parameters of a norm are one row. Lane operations are counted per element.
"""

from __future__ import annotations

import sympy

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_SIZES, (_R, _W) = sizes("rows: rows", "width: elements of a row")
_ROW = _R * _W


def _norm(name: str, summary: str, reads: int, writes: int, ops: int, contract: str | None) -> Kernel:
    return Kernel(
        name,
        "rows_norm",
        summary,
        _SIZES,
        "rows in and out once in BF16, gamma once",
        read={Role.ACTIVATIONS: _ROW * 2 * reads, Role.WEIGHTS: _W * 2},
        write={Role.ACTIVATIONS: _ROW * 2 * writes},
        vector_ops=_ROW * ops,
        counts={"rows": _R},
        contract=contract,
    )


def _plain(name: str, summary: str, in_bytes: float, out_bytes: float, ops: float) -> Kernel:
    return Kernel(
        name,
        "rows_norm",
        summary,
        _SIZES,
        "rows in and out once",
        read={Role.ACTIVATIONS: _ROW * in_bytes},
        write={Role.ACTIVATIONS: _ROW * out_bytes},
        vector_ops=_ROW * ops,
        counts={"rows": _R},
    )


SWIGLU = Kernel(
    "swiglu",
    "rows_swiglu",
    "silu(gate) * up; width is that of the output, the input row is twice as wide",
    _SIZES,
    "op-plugin documentation of npu_swiglu; BF16",
    read={Role.ACTIVATIONS: _ROW * 4},
    write={Role.ACTIVATIONS: _ROW * 2},
    vector_ops=_ROW * 6,
    counts={"rows": _R},
    contract="npu_swiglu",
)

_TOP, (_TR, _TW, _TK) = sizes("rows: rows", "width: elements of a row", "k: elements kept")
TOP_K = Kernel(
    "top_k",
    "rows_norm",
    "largest k of each row with their indices",
    _TOP,
    "FP32 in, values and INT32 indices out; log2(k) + 1 passes",
    read={Role.ACTIVATIONS: _TR * _TW * 4},
    write={Role.ACTIVATIONS: _TR * _TK * 8},
    vector_ops=_TR * _TW * (sympy.log(_TK + 1, 2) + 1),
    counts={"rows": _TR},
    at_most=(("k", "width"),),
)

KERNELS = (
    _norm("rms_norm", "root mean square norm", 1, 1, 4, "npu_rms_norm"),
    _norm("add_rms_norm", "residual add and norm; the sum is written too", 2, 2, 5, "npu_add_rms_norm"),
    _norm("layer_norm", "layer norm", 1, 1, 7, None),
    _plain("softmax", "softmax of FP32 scores", 4, 4, 5),
    _plain("reduce", "sum, mean or maximum of each row, BF16 in", 2, 0, 1),
    SWIGLU,
    TOP_K,
)
