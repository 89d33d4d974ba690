"""cannopy::rotary(x, cos, sin, interleaved): rotary position embedding over the whole last dim D of x.

cos and sin hold one angle per pair and broadcast against x's leading dims: [..., D/2].
Pairs are (x[2i], x[2i+1]) when ``interleaved``, else (x[i], x[i + D/2]). The result is always in the half-split
layout: first elements of all pairs, then second elements (DeepSeek's "interleave" form de-interleaves first).
"""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The plain ATen form, every product rounded to x's dtype as eager models do."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.library.custom_op("cannopy::rotary", mutates_args=())
def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """See the module."""
    return reference(x, cos, sin, interleaved)


@rotary.register_fake
def _fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
