"""npu_swiglu on the CPU."""

from __future__ import annotations

import torch


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(a)·b`` with a, b the first and second half of `input` along `dim`; fp32 inside, one rounding.

    Source: Ascend documentation of torch_npu.npu_swiglu.
    """
    gate, up = input.float().chunk(2, dim=dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)
