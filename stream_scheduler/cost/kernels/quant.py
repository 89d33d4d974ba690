"""Quantisation of rows to INT8, with given or computed scales, and fused behind SwiGLU."""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_SIZES, (_R, _W) = sizes("rows: rows", "width: elements of an output row")


def _quant(name: str, summary: str, in_bytes: float, ops: int, row_bytes: int, source: str) -> Kernel:
    return Kernel(
        name,
        "rows_quant",
        summary,
        _SIZES,
        source,
        read={Role.ACTIVATIONS: _R * _W * in_bytes},
        write={Role.ACTIVATIONS: _R * (_W + row_bytes)},
        vector_ops=_R * _W * ops,
        counts={"rows": _R},
    )


KERNELS = (
    _quant("quant", "INT8 rows with a given scale", 2, 3, 0, "op-plugin documentation of npu_quantize; BF16 in"),
    _quant(
        "dynamic_quant", "INT8 rows and one scale per row", 2, 5, 4,
        "op-plugin documentation of npu_dynamic_quant; BF16 in",
    ),
    _quant(
        "dequant_swiglu_quant", "INT32 accumulators to SwiGLU to INT8 rows with scales", 8, 12, 4,
        "op-plugin documentation of npu_dequant_swiglu_quant; the input row has twice the width in INT32",
    ),
)
