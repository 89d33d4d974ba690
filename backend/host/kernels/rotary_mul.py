"""npu_rotary_mul on the CPU."""

from __future__ import annotations

import torch

from . import _numerics


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x·r1 + rotate(x)·r2`` with r1 = cos, r2 = sin broadcast over input; fp32 inside, one rounding.

    Mode half: rotate(x) = cat(-x₂, x₁) of the halves. Mode interleave: pairs (x₂ᵢ, x₂ᵢ₊₁) → (-x₂ᵢ₊₁, x₂ᵢ).
    Source: op-plugin doc of npu_rotary_mul. `rotate` (a matrix) is refused by the host clauses of the contract.
    """
    if rotary_mode == "half":
        return _numerics.rotate_half(input, r1, r2).to(input.dtype)
    x = input.float()
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return (x * r1.float() + turned * r2.float()).to(input.dtype)
