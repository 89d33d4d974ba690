"""npu_rms_norm on the CPU."""

from __future__ import annotations

import torch

from . import _numerics


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """``y = x / sqrt(mean(x²) + ε) · γ`` over the last ``gamma.dim()`` dimensions.

    Computed in fp32 and rounded once. Returns y (shape and dtype of input) and the reciprocal root mean square
    (fp32, normalised dimensions 1). Source: Ascend documentation of torch_npu.npu_rms_norm.
    """
    y, rstd = _numerics.rms(input, gamma, epsilon)
    return y.to(input.dtype), rstd
