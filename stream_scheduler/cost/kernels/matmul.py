"""Dense matmuls: y[M, N] = x[M, K] @ w[K, N], and their batched form.

MACs are M K N; bytes are each operand once. Weights are in the NZ format that CANN lays them out in; W8A8 and
W4A8 multiply INT8 activations and write BF16.
"""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "operands once; op-plugin documentation of npu_quant_matmul and npu_transpose_batchmatmul"

_SIZES, (_M, _K, _N) = sizes("m: rows of x", "k: reduced size", "n: columns of the weight")


def _matmul(name: str, dtype: str, x_bytes: float, w_bytes: float, y_bytes: float, law: str, what: str) -> Kernel:
    return Kernel(
        name,
        law,
        f"y = x @ w, {what}",
        _SIZES,
        SOURCE,
        read={Role.WEIGHTS: _K * _N * w_bytes, Role.ACTIVATIONS: _M * _K * x_bytes},
        write={Role.ACTIVATIONS: _M * _N * y_bytes},
        macs=_M * _K * _N,
        mac_dtype=dtype,
        counts={"m": _M, "depth": _K},
        cube=True,
        vector=False,
    )


_BATCH, (_B, _BM, _BK, _BN) = sizes(
    "batch: independent products, heads in MLA", "m: rows of each x", "k: reduced size", "n: columns of each weight"
)
BATCH_MATMUL = Kernel(
    "batch_matmul",
    "batch_matmul",
    "y[b] = x[b] @ w[b] in BF16; the W_UK and W_UV products of absorbed MLA",
    _BATCH,
    SOURCE,
    read={Role.WEIGHTS: _B * _BK * _BN * 2, Role.ACTIVATIONS: _B * _BM * _BK * 2},
    write={Role.ACTIVATIONS: _B * _BM * _BN * 2},
    macs=_B * _BM * _BK * _BN,
    counts={"m": _BM, "tasks": _B},
    cube=True,
    vector=False,
    contract="npu_transpose_batchmatmul",
)

KERNELS = (
    _matmul("bf16_matmul", "bf16", 2, 2, 2, "matmul_bf16", "BF16"),
    _matmul("fp32_matmul", "fp32", 4, 4, 4, "matmul_bf16", "FP32, as in the gate of a MoE layer"),
    _matmul("int8_matmul", "int8", 1, 1, 2, "matmul_int8", "W8A8"),
    _matmul("w4a8_matmul", "int8", 1, 0.5, 2, "matmul_int8", "W4A8"),
    BATCH_MATMUL,
)
