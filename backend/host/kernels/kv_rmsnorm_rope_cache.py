"""npu_kv_rmsnorm_rope_cache_v2_functional on the CPU, caches in plain blocks."""

from __future__ import annotations

from typing import Any

import torch

from ....fusion_rules.contracts import value_error
from . import _numerics

OP = "npu_kv_rmsnorm_rope_cache_v2_functional"


def npu_kv_rmsnorm_rope_cache_v2_functional(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    is_output_kv: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``ckv_cache[index] = rms(kv[:512])·γ`` and ``k_cache[index] = rope(kv[512:])`` on copies of the caches.

    kv [B,1,S,576], cos and sin [B,1,S,64], index int64 [B·S] rows of the caches [blocks,rows,1,64 or 512]. The rotated
    part is taken as pairs of neighbours and de-interleaved. Returns (rope, latent, k_cache, ckv_cache); the first two
    [B,1,S,64] and [B,1,S,512] are zeros unless is_output_kv asks for them. fp32 inside, one rounding.
    Source: op-plugin doc of npu_kv_rmsnorm_rope_cache.
    """
    width = gamma.shape[0]
    latent = _numerics.rms(kv[..., :width], gamma, epsilon)[0].to(kv.dtype)
    rope = _numerics.rotate_half(_numerics.deinterleave(kv[..., width:]), cos, sin).to(kv.dtype)
    limit = k_cache.shape[0] * k_cache.shape[1]
    bad = (index < 0) | (index >= limit)
    if bool(bad.any()):
        raise value_error(OP, "index-range", f"{index.tolist()} for {limit} rows")
    written = []
    for cache, rows in ((k_cache, rope), (ckv_cache, latent)):
        new = cache.clone(memory_format=torch.contiguous_format)
        new.view(limit, -1)[index] = rows.reshape(index.numel(), -1)
        written.append(new)
    if not is_output_kv:
        rope, latent = torch.zeros_like(rope), torch.zeros_like(latent)
    return rope.contiguous(), latent.contiguous(), written[0], written[1]
