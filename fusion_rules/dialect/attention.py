"""attention(q, k, v, mask) = softmax(q·kᵀ·scale + mask)·v

One node for PyTorch's scaled dot-product attention, whichever kernel eager would choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool is_causal, bool enable_gqa, "
    "bool nan_unseen=False) -> Tensor"
)

_libraries: list[torch.library.Library] = []
"""Keeps the registration alive: torch drops an operator together with its Library object."""


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool, enable_gqa: bool,
    nan_unseen: bool = False,
) -> Tensor:
    """Attention in plain ATen with scores, softmax and weighted sum in float32 (float64 for float64 inputs).

    Args:
        q: ``[..., H, S, D]``.
        k: ``[..., Hk, T, D]``; Hk is H, or divides it when ``enable_gqa``.
        v: ``[..., Hk, T, Dv]``.
        mask: broadcasts to ``[..., H, S, T]``; bool (True takes part) or a float that is added to the scores.
        scale: factor of the scores.
        is_causal: query i sees keys 0…i, counted from the upper left corner, as in PyTorch.
        enable_gqa: each key head serves H/Hk consecutive query heads.
        nan_unseen: a query all of whose scores are -inf gives NaN, as a softmax that is written out does.

    Returns:
        ``[..., H, S, Dv]`` of q's dtype, contiguous. Without ``nan_unseen`` a query all of whose scores are -inf gives
        zeros, as PyTorch's attention does.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(wide)
    weights = torch.softmax(scores, dim=-1)
    if not nan_unseen:
        weights = weights.masked_fill((scores == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    return torch.matmul(weights, v.to(wide)).to(q.dtype).contiguous()


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, is_causal: bool, enable_gqa: bool,
    nan_unseen: bool = False,
) -> Tensor:
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads = q.shape[-3:-2] if enable_gqa else torch.broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2])
    return q.new_empty((*lead, *heads, q.shape[-2], v.shape[-1]))


def register() -> None:
    """Defines ``torch.ops.cannopy.attention`` unless it is defined already."""
    if hasattr(torch.ops.cannopy, "attention"):
        return
    library = torch.library.Library("cannopy", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("attention", reference, "CompositeExplicitAutograd")
    torch.library.register_fake("cannopy::attention", _fake, lib=library)
    _libraries.append(library)
