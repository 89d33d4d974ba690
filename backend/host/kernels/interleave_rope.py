"""npu_interleave_rope on the CPU."""

from __future__ import annotations

import torch

from . import _numerics


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """De-interleave the last dimension, then ``q·cos + rotate_half(q)·sin``; the result stays de-interleaved.

    x [B,N,S,64], cos and sin [B,1,S|1,64]; fp32 inside, one rounding. Source: op-plugin doc of npu_interleave_rope.
    """
    return _numerics.rotate_half(_numerics.deinterleave(x), cos, sin).to(x.dtype)
