"""Collectives between the processes of a group, and dispatch and combine of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cannopy.backend.host import exchange
from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor, host_ints


def _group(op: Op) -> Any:
    """The process group of attribute ``group``, looked up when the op runs: a graph may be loaded before there is one.
    """
    try:
        return exchange.group_of(op.text("group", ""))
    except exchange.GroupError as e:
        raise op.error(str(e)) from e


def all_gather(op: Op) -> Kernel:
    """y: x of every rank, one behind the other."""
    return lambda x: exchange.all_gather(x, _group(op), op.where()).flatten(0, 1)


def all_reduce(op: Op) -> Kernel:
    """y: the reduction over the ranks."""
    how = _reduction(op)
    return lambda x: exchange.reduce(exchange.all_gather(x, _group(op), op.where()), how)


def reduce_scatter(op: Op) -> Kernel:
    """y: this rank's part of the reduction over the ranks."""
    how = _reduction(op)

    def kernel(x: Tensor) -> Tensor:
        group = _group(op)
        size = group.size()
        each = [x.shape[0] // size] * size
        parts = exchange.all_to_all(x, each, each, group, op.where())
        return exchange.reduce(parts.view(size, -1, *x.shape[1:]), how)

    return kernel


def _reduction(op: Op) -> str:
    how = op.text("reduction", "")
    if how not in exchange.REDUCTIONS:
        raise op.error(f"reduction {how!r}; the host engine knows {', '.join(exchange.REDUCTIONS)}")
    return how


def all_to_all(op: Op) -> Kernel:
    """y: an equal part of x to each rank."""

    def kernel(x: Tensor) -> Tensor:
        group = _group(op)
        each = [x.shape[0] // group.size()] * group.size()
        return exchange.all_to_all(x, each, each, group, op.where())

    return kernel


def all_to_all_v(op: Op) -> Kernel:
    """recv_data: elements by counts and displacements, those that come from rank 0 first."""

    def kernel(x: Tensor, *given: Tensor) -> Tensor:
        group = _group(op)
        send, start, receive, place = (host_ints(op, i + 1, t) for i, t in enumerate(given))
        flat = x.reshape(-1)
        parts = torch.cat([flat[a : a + n] for a, n in zip(start, send, strict=True)])
        came = exchange.all_to_all(parts, send, receive, group, op.where())
        out = came.new_zeros(max((a + n for a, n in zip(place, receive, strict=True)), default=0))
        for piece, a in zip(came.split(receive), place, strict=True):
            out[a : a + len(piece)] = piece
        return out.view(-1, *x.shape[1:])

    return kernel


def broadcast(op: Op) -> Kernel:
    """One y per x: what the root rank of the group has."""
    root = op.integer("root_rank", 0)

    def kernel(*xs: Tensor) -> Sequence[Tensor]:
        group = _group(op)
        source = torch.distributed.get_global_rank(group, root)
        return [exchange.broadcast(x, source, group, op.where()) for x in xs]

    return kernel


_COMMON = ("ep_world_size", "ep_rank_id", "moe_expert_num", "tp_world_size", "tp_rank_id", "expert_shard_type",
           "shared_expert_rank_num", "global_bs", "zero_expert_num", "copy_expert_num", "const_expert_num")


def _attributes(op: Op, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: op.integer(name, 0) for name in (*_COMMON, *more)}
    found["shared_expert_num"] = op.integer("shared_expert_num", 1)
    return found | {name: op.text(name, "") for name in ("group_ep", "group_tp", "comm_alg")}


def moe_distribute_dispatch_v2(op: Op) -> Kernel:
    """(expand_x, dynamic_scales, assist_info_for_combine, expert_token_nums, ep_recv_count, tp_recv_count,
    expand_scales)."""
    attrs = _attributes(op, "quant_mode") | {"expert_token_nums_type": op.integer("expert_token_nums_type", 1)}
    return _by_name(op, torch.ops.npu.npu_moe_distribute_dispatch_v2, attrs)


def moe_distribute_combine_v2(op: Op) -> Kernel:
    """x [BS, H]."""
    return _by_name(op, torch.ops.npu.npu_moe_distribute_combine_v2, _attributes(op, "comm_quant_mode"))


def _by_name(op: Op, function: Any, attrs: dict[str, Any]) -> Kernel:
    def kernel(*args: Tensor | None) -> Any:
        given = {n: a for n, a in zip(op.inputs, args, strict=True) if a is not None}
        return function(**given, **attrs)

    return kernel


OPS: dict[str, Builder] = {
    "HcomAllGather": all_gather,
    "HcomAllReduce": all_reduce,
    "HcomAllToAll": all_to_all,
    "HcomAllToAllV": all_to_all_v,
    "HcomBroadcast": broadcast,
    "HcomReduceScatter": reduce_scatter,
    "MoeDistributeCombineV2": moe_distribute_combine_v2,
    "MoeDistributeDispatchV2": moe_distribute_dispatch_v2,
}
