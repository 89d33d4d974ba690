"""npu_add_rms_norm on the CPU."""

from __future__ import annotations

import torch

from . import _numerics


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x = x1 + x2``, ``y = rms_norm(x)·γ``; returns (y, rstd fp32, x).

    The sum is rounded to the inputs' dtype, and the rounded sum is what is normalised: the residual that the
    next layer reads and the norm see the same numbers, as in the unfused graph.
    Source: op-plugin doc of npu_add_rms_norm (which states the formula and not where it rounds).
    """
    x = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _numerics.rms(x, gamma, epsilon)
    return y.to(x1.dtype), rstd, x
