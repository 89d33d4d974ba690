"""RmsNorm and AddRmsNorm through the CPU kernels of torch.ops.npu."""

from __future__ import annotations

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op


def rms_norm(op: Op) -> Kernel:
    """(y, rstd fp32)."""
    epsilon = op.number("epsilon", 1e-6)
    return lambda x, gamma: torch.ops.npu.npu_rms_norm(x, gamma, epsilon)


def add_rms_norm(op: Op) -> Kernel:
    """(y, rstd fp32, x = x1 + x2)."""
    epsilon = op.number("epsilon", 1e-6)
    return lambda x1, x2, gamma: torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, epsilon)


OPS: dict[str, Builder] = {"AddRmsNorm": add_rms_norm, "RmsNorm": rms_norm}
