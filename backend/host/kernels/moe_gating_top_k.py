"""npu_moe_gating_top_k on the CPU."""

from __future__ import annotations

import torch


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expert choice of a mixture of experts; x [T,E] → (weights [T,k] of x's dtype, ids int32 [T,k], norm fp32 [T,E]).

    Scores are softmax (norm_type 0) or sigmoid (1) of x in fp32. The choice is made on scores + bias: the k_group best
    of group_count groups (best member, or sum of the two best with group_select_mode 1), then the k best experts in
    them; equal values keep the lower id. Weights are the scores without bias, divided by their sum + eps for sigmoid
    only, times routed_scaling_factor. The third output is the scores if out_flag, else zeros.
    Source: op-plugin doc of npu_moe_gating_top_k.
    """
    logits = x.float()
    scores = torch.sigmoid(logits) if norm_type == 1 else torch.softmax(logits, dim=-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        choice = _best_groups(choice, k_group, group_count, group_select_mode)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    return weights.to(x.dtype), ids.to(torch.int32), scores if out_flag else torch.zeros_like(scores)


def _best_groups(choice: torch.Tensor, k_group: int, group_count: int, group_select_mode: int) -> torch.Tensor:
    """`choice` with -inf outside the k_group best groups of each row."""
    grouped = choice.unflatten(-1, (group_count, choice.shape[-1] // group_count))
    rank = grouped.topk(2, dim=-1).values.sum(dim=-1) if group_select_mode == 1 else grouped.amax(dim=-1)
    best = rank.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, best, True)
    masked: torch.Tensor = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    return masked
