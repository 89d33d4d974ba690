"""cannopy::rms_norm(x, gamma, eps): x / sqrt(mean(x²) + eps) · gamma over the last dim.

Shapes: x [..., D], gamma [D]; the result has x's shape and dtype. The statistics are fp32. The normalised value is
rounded to x's dtype before it is multiplied by gamma of that dtype (the order of the Llama family); an fp32 gamma
multiplies the fp32 value, which is then rounded.
"""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """The plain ATen form."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if gamma.dtype != x.dtype:
        return (wide * scale * gamma).to(x.dtype)
    return gamma * (wide * scale).to(x.dtype)


@torch.library.custom_op("cannopy::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """See the module."""
    return reference(x, gamma, eps)


@rms_norm.register_fake
def _fake(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
