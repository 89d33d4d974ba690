"""Dispatch and combine between the ranks of `lockstep`: each rank's kernel with the tensors of all in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cannopy.fusion_rules.contracts import demand
from tests.parallel.lockstep import Joint

npu = torch.ops.npu
Tensor = torch.Tensor
WIDTH = 128
GARBAGE = 8192.0


def joint(target: str = "atlas-a3") -> dict[Any, tuple[str, Joint]]:
    """The two operators for `lockstep.run`, behind their contracts on ``target``."""
    return {
        npu.npu_moe_distribute_dispatch_v2.default: ("group_ep", lambda a, k: _dispatch(target, a, k)),
        npu.npu_moe_distribute_combine_v2.default: ("group_ep", lambda a, k: _combine(target, a, k)),
    }


def _dispatch(target: str, args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> list[Any]:
    for one, named in zip(args, kwargs, strict=True):
        demand("npu_moe_distribute_dispatch_v2", one, named, target)
    return [_received(args, kwargs, rank) for rank in range(len(args))]


def _received(args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]], rank: int) -> tuple[Tensor, ...]:
    """What ``rank`` gets: by expert, then source, then token. Rows that no token came for hold garbage."""
    size, position, experts = args[rank][3:6]
    assert (size, position) == (len(args), rank)
    local = experts // size
    rows, origin, counts = [], [], torch.zeros(local, size, dtype=torch.int64)
    for expert in range(local):
        for source, (x, ids, *_) in enumerate(args):
            for token, choice in (ids == rank * local + expert).nonzero().tolist():
                rows.append(x[token])
                origin.append((source, token, choice))
                counts[expert, source] += 1
    x, ids = args[rank][:2]
    capacity = len(x) * size * min(local, ids.shape[1])
    out = x.new_full((capacity, x.shape[1]), GARBAGE)
    info = torch.full((max(ids.numel(), capacity * WIDTH),), -1, dtype=torch.int32)
    scales = torch.zeros(capacity if "expert_scales" in kwargs[rank] else 0)
    for row, (source, token, choice) in enumerate(origin):
        out[row] = rows[row]
        info[row * WIDTH : row * WIDTH + 3] = torch.tensor((source, token, choice))
        if len(scales):
            scales[row] = kwargs[source]["expert_scales"][token, choice]
    return (out, torch.zeros(capacity), info, counts.sum(1), counts.flatten().cumsum(0).int(),
            torch.zeros(0, dtype=torch.int32), scales)


def _combine(target: str, args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    for one, named in zip(args, kwargs, strict=True):
        demand("npu_moe_distribute_combine_v2", one, named, target)
    totals = [torch.zeros(*a[1].shape, a[0].shape[1]) for a in args]
    for out, _, assist, received, *_ in args:
        for row in range(int(received[-1])):
            source, token, choice = assist[row * WIDTH : row * WIDTH + 3].tolist()
            totals[source][token, choice] = out[row].float()
    results = []
    for (out, ids, _, _, scales, _, _, _, experts), named, total in zip(args, kwargs, totals, strict=True):
        zero = experts + named.get("zero_expert_num", 0)
        copies = (ids >= zero) & (ids < zero + named.get("copy_expert_num", 0))
        if named.get("copy_expert_num"):
            total[copies] = named["ori_x"].float()[:, None].expand_as(total)[copies]
        results.append((total * scales[..., None]).sum(1).to(out.dtype))
    return results
