"""Fused ops of one product or one elementwise formula, through the CPU kernels of torch.ops.npu."""

from __future__ import annotations

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor

_ROTARY_MODES = ("half", "interleave", "quarter", "interleave-half")
"""torchair's numbering, ge_converter/custom/npu_rotary_mul.py."""


def swiglu(op: Op) -> Kernel:
    """y = silu(first half) * second half along ``dim``."""
    dim = op.integer("dim", -1)
    return lambda x: torch.ops.npu.npu_swiglu(x, dim)


def rotary_mul(op: Op) -> Kernel:
    """y = x * r1 + rotate_half(x) * r2; the type has no attribute for another mode."""
    return lambda x, r1, r2: torch.ops.npu.npu_rotary_mul(x, r1, r2)


def rotary_position_embedding(op: Op) -> Kernel:
    """Rotation in ``mode`` 0 … 3 (half, interleave, quarter, interleave-half)."""
    mode = op.integer("mode", 0)
    if not 0 <= mode < len(_ROTARY_MODES):
        raise op.error(f"mode is {mode}, expected 0 … {len(_ROTARY_MODES) - 1}")
    return lambda x, cos, sin, rotate=None: torch.ops.npu.npu_rotary_mul(x, cos, sin, _ROTARY_MODES[mode], rotate)


def interleave_rope(op: Op) -> Kernel:
    """Rotation of pairs (2i, 2i+1), result half-split."""
    return lambda x, cos, sin: torch.ops.npu.npu_interleave_rope(x, cos, sin)


def transpose_batch_matmul(op: Op) -> Kernel:
    """y = (x1 in perm_x1 @ x2 in perm_x2) in perm_y."""
    attrs = {
        "perm_x1": op.integers("perm_x1", (0, 1, 2)),
        "perm_x2": op.integers("perm_x2", (0, 1, 2)),
        "perm_y": op.integers("perm_y", (1, 0, 2)),
        "batch_split_factor": op.integer("batch_split_factor", 1),
    }

    def kernel(x1: Tensor, x2: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        y: Tensor = torch.ops.npu.npu_transpose_batchmatmul(x1, x2, bias=bias, scale=scale, **attrs)
        return y

    return kernel


OPS: dict[str, Builder] = {
    "InterleaveRope": interleave_rope,
    "RotaryMul": rotary_mul,
    "RotaryPositionEmbedding": rotary_position_embedding,
    "SwiGlu": swiglu,
    "TransposeBatchMatMul": transpose_batch_matmul,
}
