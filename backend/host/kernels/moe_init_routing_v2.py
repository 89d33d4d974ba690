"""npu_moe_init_routing_v2 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....fusion_rules.contracts import value_error

CUMSUM, COUNT, KEY_VALUE = 0, 1, 2
"""Values of expert_tokens_num_type."""


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = CUMSUM,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy each token once per chosen expert and order the copies by expert; dropless and unquantised.

    x [T,H], expert_idx int32 [T,K]. With R the pairs (token, choice) in stable order of expert id, active range first:
    expanded_x [T·K | active_num, H] has ``x[R[i] // K]`` in row i; expanded_row_idx int32 [T·K] has the row of each
    pair (row_idx_type 0) or the pair of each row (1), -1 where there is none; the third output int64 counts rows per
    expert of the range (1), their running sum (0), or (expert, count) pairs of the busy experts [expert_num,2] (2), and
    is an empty-shape 0 without expert_tokens_num_flag; the fourth is scale per row, or zeros.
    Rows that belong to no active expert are zero (the device leaves them unset).
    Source: op-plugin doc of npu_moe_init_routing_v2.
    """
    first, last = active_expert_range if active_expert_range else (0, expert_num)
    ids = _checked_ids(expert_idx, expert_num)
    pairs, k = ids.numel(), expert_idx.shape[1]
    active = (ids >= first) & (ids < last)
    order = torch.where(active, ids, torch.iinfo(torch.int64).max).sort(stable=True).indices
    available = int(active.sum())
    rows = pairs if active_num <= 0 else min(active_num, pairs)
    used = order[: min(rows, available)]
    expanded = x.new_zeros((rows, x.shape[1]))
    expanded[: used.numel()] = x[used // k]
    row_scale = torch.zeros(rows, dtype=torch.float32)
    if scale is not None:
        row_scale[: used.numel()] = scale[used // k]
    row_idx = torch.full((pairs,), -1, dtype=torch.int32)
    if row_idx_type == 1:
        row_idx[:available] = order[:available].to(torch.int32)
    else:
        row_idx[order[:available]] = torch.arange(available, dtype=torch.int32)
    counts = torch.bincount(ids[active] - first, minlength=last - first)
    if not expert_tokens_num_flag:
        return expanded, row_idx, torch.zeros((), dtype=torch.int64), row_scale
    return expanded, row_idx, _token_counts(counts, expert_tokens_num_type, first, expert_num), row_scale


def _checked_ids(expert_idx: torch.Tensor, expert_num: int) -> torch.Tensor:
    ids = expert_idx.flatten().long()
    bad = (ids < 0) | (ids >= expert_num)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise value_error(
            "npu_moe_init_routing_v2", "expert-range", f"{int(ids[at])} at pair {at}, {expert_num} experts"
        )
    return ids


def _token_counts(counts: torch.Tensor, kind: int, first: int, expert_num: int) -> torch.Tensor:
    if kind == COUNT:
        return counts
    if kind == CUMSUM:
        return counts.cumsum(0)
    busy = counts.nonzero().flatten()
    table = torch.zeros((expert_num, 2), dtype=torch.int64)
    table[: busy.numel(), 0] = busy + first
    table[: busy.numel(), 1] = counts[busy]
    return table
