"""npu_moe_distribute_dispatch_v2 on the CPU, between the processes of a group."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error
from .. import exchange

OP = "npu_moe_distribute_dispatch_v2"
WIDTH = 128
"""Numbers of assist_info_for_combine per row of expand_x; the first three are source rank, token and choice."""
UNUSED = 8192.0
"""What rows hold that no token has come for: a consumer that reads them shows it."""


def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Send each token to the ranks that have its experts; unquantised, every rank with experts.

    x [BS,H], expert_ids int32 [BS,K]; rank r of the group has experts r·E/ep to (r+1)·E/ep - 1. Ids from E on are zero,
    copy and constant experts and send nothing, nor do tokens (1-D) or choices (2-D) that x_active_mask leaves out.
    expand_x [A,H] has the received rows by local expert, within one by source rank, then by token;
    A = BS·ep·min(E/ep, K), or global_bs·min(E/ep, K). expert_token_nums int64 [E/ep] counts them (type 1) or sums up
    the counts (type 0). assist_info_for_combine and ep_recv_counts (running sums by local expert and source rank) are
    for combine only; what else is in them differs between devices. Rows behind the last token are not set.
    expert_scales float32 [BS,K] come out by row as expand_scales [A], and ep_recv_counts is then longer by
    2·global_bs·K·(ep//8) numbers that stay 0 here. Source: op-plugin doc of npu_moe_distribute_dispatch_v2.
    """
    order = sending_order(expert_ids, x_active_mask, moe_expert_num,
                          zero_expert_num + copy_expert_num + const_expert_num)
    local = moe_expert_num // ep_world_size
    tokens = global_bs or x.shape[0] * ep_world_size
    capacity = tokens * min(local, expert_ids.shape[1])
    expand_x, assist, by_source, expand_scales = _exchanged(
        x, expert_ids, order, group_ep, (ep_world_size, ep_rank_id, local), capacity, expert_scales)
    per_expert = by_source.sum(0)
    received = by_source.t().flatten().cumsum(0).to(torch.int32)
    if expert_scales is not None:
        received = torch.cat([received, received.new_zeros(2 * tokens * expert_ids.shape[1] * (ep_world_size // 8))])
    return (
        expand_x,
        torch.zeros(capacity), assist,
        per_expert if expert_token_nums_type == 1 else per_expert.cumsum(0),
        received,
        torch.zeros(tp_world_size, dtype=torch.int32),
        expand_scales,
    )


def _exchanged(
    x: torch.Tensor, expert_ids: torch.Tensor, order: torch.Tensor, name: str, place: tuple[int, int, int],
    capacity: int, scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """expand_x, assist_info_for_combine, how many rows came, [source rank, local expert], and ``scales`` [BS,K] by row.
    ``place`` is the number of ranks, this rank, and experts per rank; ``order`` the pairs to send."""
    (ranks, rank, local), k, group = place, expert_ids.shape[1], exchange.group_of(name)
    ids = expert_ids.flatten().long()[order]
    send = torch.bincount(ids, minlength=ranks * local)
    counts = exchange.all_to_all(send, [local] * ranks, [local] * ranks, group, OP)
    by_source = counts.view(ranks, local)
    to, come = send.view(ranks, local).sum(1).tolist(), by_source.sum(1).tolist()
    if sum(come) > capacity:
        raise value_error(OP, "capacity", f"{sum(come)} tokens for this rank, {capacity} rows")
    rows = exchange.all_to_all(x[order // k], to, come, group, OP)
    info = torch.stack([torch.full_like(order, rank), order // k, order % k], 1).to(torch.int32)
    origin = exchange.all_to_all(info, to, come, group, OP)
    experts = torch.arange(local).repeat(ranks).repeat_interleave(counts)
    sorted_rows = experts.sort(stable=True).indices
    expand_x = x.new_full((capacity, x.shape[1]), UNUSED)
    expand_x[: len(rows)] = rows[sorted_rows]
    assist = torch.full((max(x.shape[0] * k, capacity * WIDTH),), -1, dtype=torch.int32)
    assist[: len(rows) * WIDTH].view(-1, WIDTH)[:, :3] = origin[sorted_rows]
    expand_scales = torch.zeros(0 if scales is None else capacity)
    if scales is not None:
        expand_scales[: len(rows)] = exchange.all_to_all(scales.flatten()[order], to, come, group, OP)[sorted_rows]
    return expand_x, assist, by_source, expand_scales


def active_choices(expert_ids: torch.Tensor, x_active_mask: torch.Tensor | None) -> torch.Tensor:
    """Bool [BS,K]: the choices that take part. `ContractError` when a token is left out before one that is not."""
    if x_active_mask is None:
        return torch.ones_like(expert_ids, dtype=torch.bool)
    if x_active_mask.dim() == 2:
        return x_active_mask
    if bool((~x_active_mask[:-1] & x_active_mask[1:]).any()):
        raise value_error(OP, "mask-order", f"{x_active_mask.tolist()}")
    return x_active_mask[:, None].expand_as(expert_ids)


def sending_order(
    expert_ids: torch.Tensor, x_active_mask: torch.Tensor | None, experts: int, special: int
) -> torch.Tensor:
    """The pairs token·K + choice that are sent, by expert, then by token. `ContractError` for ids and masks that the
    documentation forbids."""
    ids = expert_ids.long()
    active = active_choices(expert_ids, x_active_mask)
    bad = active & ((ids < 0) | (ids >= experts + special))
    if bool(bad.any()):
        token, choice = bad.nonzero()[0].tolist()
        raise value_error(OP, "expert-range", f"{int(ids[token, choice])} at token {token}, choice {choice}")
    twice = ids.sort(1).values
    same = (twice[:, 1:] == twice[:, :-1]).any(1) & active.any(1)
    if bool(same.any()):
        token = int(same.nonzero()[0])
        raise value_error(OP, "expert-distinct", f"{ids[token].tolist()} at token {token}")
    pairs = (active & (ids < experts)).flatten().nonzero().flatten()
    return pairs[ids.flatten()[pairs].sort(stable=True).indices]
