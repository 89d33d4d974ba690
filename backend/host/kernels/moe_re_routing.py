"""npu_moe_re_routing on the CPU."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error


def npu_moe_re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    *,
    per_token_scales: torch.Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order rows that stand by rank, then by expert, by expert, then by rank.

    tokens [A,H]; expert_token_num_per_rank [ranks,E] counts the rows of each rank for each expert and has the sum A.
    The results: the rows [A,H]; their per_token_scales [A] (zeros where there are none: the device sets nothing);
    int32 [A], the old number of each new row; the rows of each expert [E].
    Source: op-plugin doc of npu_moe_re_routing.
    """
    counts = expert_token_num_per_rank.long()
    if bool((counts < 0).any()) or int(counts.sum()) != tokens.shape[0]:
        raise value_error("npu_moe_re_routing", "counts", f"{counts.tolist()} for {tokens.shape[0]} tokens")
    ranks, experts = counts.shape
    expert = torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten())
    order = expert.sort(stable=True).indices
    scales = torch.zeros(tokens.shape[0]) if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, order.to(torch.int32), counts.sum(0).to(expert_token_num_per_rank.dtype)
