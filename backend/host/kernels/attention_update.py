"""npu_attention_update on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def npu_attention_update(lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor],
                         update_type: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``L = log Σ exp(lse_i)``, ``out = Σ local_out_i · exp(lse_i - L)``: attention over parts of the keys, joined.

    lse: fp32 [rows] of each part, local_out: [rows, D] of each part. Returns (out [rows, D], L [rows] fp32, which means
    nothing unless update_type is 1: NaN). fp32 inside, one rounding. Source: docstring of
    torch_npu.npu_attention_update.
    """
    parts = torch.stack(list(lse))
    total = torch.logsumexp(parts, dim=0)
    out = (torch.stack(list(local_out)).float() * (parts - total).exp().unsqueeze(-1)).sum(0)
    return out.to(local_out[0].dtype), total if update_type == 1 else torch.full_like(total, float("nan"))
