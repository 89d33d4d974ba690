"""npu_moe_distribute_combine_v2 on the CPU, between the processes of a group."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error
from .. import exchange
from .moe_distribute_dispatch_v2 import UNUSED, WIDTH, active_choices, sending_order

OP = "npu_moe_distribute_combine_v2"


def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> torch.Tensor:
    """Send the experts' rows back along the way of dispatch and sum them up per token; the result is [BS,H].

    ``Σ_k expert_scales[t,k] · y[t,k]  (+ shared_expert_x[t])`` in float32, k in order, rounded once. y is the row that
    came back from a routed expert, nothing for a zero expert, ori_x[t] for a copy expert and
    ``alpha_1[i] · ori_x[t] + alpha_2[i] · v[i]`` for constant expert i. Ids from E on are zero, copy and constant
    experts, in that order. Where each row goes is read from assist_info_for_combine. Tokens that x_active_mask leaves
    out are not set.
    Source: op-plugin doc of npu_moe_distribute_combine_v2.
    """
    special = zero_expert_num + copy_expert_num + const_expert_num
    order = sending_order(expert_ids, x_active_mask, moe_expert_num, special)
    to_rank = expert_ids.flatten()[order].long() * ep_world_size // moe_expert_num
    receive = torch.bincount(to_rank, minlength=ep_world_size).tolist()
    sums = ep_send_counts[:moe_expert_num]  # what dispatch may have put behind them is for the device
    y = _returned(expand_x, expert_ids, assist_info_for_combine, sums, receive, group_ep)
    if copy_expert_num or const_expert_num:
        constants = (const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
        _special(y, expert_ids, ori_x, constants, moe_expert_num + zero_expert_num, copy_expert_num)
    active = active_choices(expert_ids, x_active_mask)
    total = torch.zeros(expert_ids.shape[0], expand_x.shape[1])
    for choice in range(expert_ids.shape[1]):
        total += torch.where(active[:, choice, None], expert_scales[:, choice, None].float() * y[:, choice], 0.0)
    if shared_expert_x is not None:
        total += shared_expert_x.reshape(total.shape).float()
    total[~active.any(1)] = UNUSED
    return total.to(expand_x.dtype)


def _returned(
    expand_x: torch.Tensor, expert_ids: torch.Tensor, assist_info: torch.Tensor, ep_send_counts: torch.Tensor,
    receive: list[int], name: str,
) -> torch.Tensor:
    """[BS,K,H] float32: what came back for each choice, zero where nothing was sent. ``receive``: rows per rank."""
    (tokens, k), used = expert_ids.shape, int(ep_send_counts[-1])
    info = assist_info[: used * WIDTH].view(-1, WIDTH)[:, :3].long()
    send = torch.bincount(info[:, 0], minlength=len(receive)).tolist()
    _check_counts(ep_send_counts, send, len(receive))
    back, group = info[:, 0].sort(stable=True).indices, exchange.group_of(name)
    rows = exchange.all_to_all(expand_x[:used][back], send, receive, group, OP)
    pairs = exchange.all_to_all(info[back, 1] * k + info[back, 2], send, receive, group, OP)
    y = expand_x.new_zeros(tokens * k, expand_x.shape[1], dtype=torch.float32)
    y[pairs] = rows.float()
    return y.view(tokens, k, -1)


def _check_counts(ep_send_counts: torch.Tensor, send: list[int], ranks: int) -> None:
    """The running sums of dispatch say the same as its assist info: both are from one dispatch."""
    counts = torch.diff(ep_send_counts.long(), prepend=torch.zeros(1, dtype=torch.int64))
    by_rank = counts.view(-1, ranks).sum(0).tolist()
    if by_rank != send:
        raise value_error(OP, "of-one-dispatch", f"{by_rank} rows per rank by the counts, {send} by the assist info")


def _special(
    y: torch.Tensor, expert_ids: torch.Tensor, ori_x: torch.Tensor | None,
    constants: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], first: int, copies: int,
) -> None:
    """Fill ``y`` [BS,K,H] at the copy experts (ids from ``first`` on) and the constant experts behind them."""
    ids = expert_ids.long() - first
    assert ori_x is not None  # the contract demands it
    own = ori_x.float()[:, None].expand_as(y)
    copied = (ids >= 0) & (ids < copies)
    y[copied] = own[copied]
    alpha_1, alpha_2, v = constants
    if alpha_1 is not None and alpha_2 is not None and v is not None:
        constant = ids >= copies
        i = ids[constant] - copies
        y[constant] = alpha_1.float()[i] * own[constant] + alpha_2.float()[i] * v.float()[i]
