"""Arithmetic shared by the CPU kernels: fp32 inside, one rounding at the edge."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` with fp32 accumulation, rounded once to a's dtype (the cube unit's L0C is fp32)."""
    return torch.matmul(a.float(), b.float()).to(a.dtype)


def rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x²) + ε) · γ`` over the dimensions of gamma, in fp32.

    Returns (y, rstd), both fp32; rstd keeps the normalised dimensions as 1.
    Formula: op-plugin doc of npu_add_rms_norm.
    """
    x = x.float()
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.square().mean(dim=dims, keepdim=True) + epsilon)
    return x * rstd * gamma.float(), rstd


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x·cos + cat(-x₂, x₁)·sin`` with x₁, x₂ the halves of the last dimension; fp32.

    Formula: op-plugin doc of npu_rotary_mul, mode half.
    """
    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()


def deinterleave(x: torch.Tensor) -> torch.Tensor:
    """Even elements of the last dimension, then the odd ones (op-plugin doc of npu_interleave_rope)."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
