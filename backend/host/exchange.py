"""Tensors between the processes of a group: what the host engine's collectives and the MoE kernels are made of.

Everything moves as bytes, so that every dtype works and nothing is rounded on the way. What is summed is summed by each
receiver in float32 (integers and float64 in their own type) in the order of the ranks and rounded once to its dtype:
all ranks get the same bits. A device may add in another order and round in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cannopy.backend import process_groups, ranks

Tensor = torch.Tensor
_LOOK = 0.25
"""Seconds between two looks at the other ranks while a collective takes its time."""


class GroupError(RuntimeError):
    """There is no process group of that name here, or it cannot move anything."""


def group_of(text: str) -> Any:
    """The process group of ``text``: a registered name, or ``tag=…;rank_list=0,1,…`` as torchair writes it."""
    if process_groups.is_fake():
        raise GroupError(f"{text}: this graph was built without the other ranks, so it cannot run")
    found = None
    if text.startswith("tag=") and process_groups.started():
        tag, _, numbers = text.removeprefix("tag=").rpartition(";rank_list=")
        members = [int(number) for number in numbers.split(",")]
        found = torch.distributed.distributed_c10d._find_pg_by_ranks_and_tag(tag, members)
    elif not text.startswith("tag="):
        found = process_groups.find(text)
    if found is None:
        why = "torch.distributed is not initialised" if not process_groups.started() else "nobody has created it"
        raise GroupError(f"there is no process group {text} here: {why}")
    return found


def all_gather(x: Tensor, group: Any, what: str) -> Tensor:
    """[…] of each rank  →  [size, …], the ranks in order."""
    source = _bytes(x)
    out = source.new_empty(group.size(), source.numel())
    _finish(lambda: torch.distributed.all_gather(list(out), source, group, async_op=True), group, what)
    return out.view(-1).view(x.dtype).view(group.size(), *x.shape)


def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any, what: str) -> Tensor:
    """The first ``send[0]`` rows go to rank 0 of the group, the next ``send[1]`` to rank 1, …; the rows that came,
    ``receive[r]`` from rank r, by rank."""
    width = rows[0].numel() * rows.element_size() if len(rows) else _width(rows)
    source = _bytes(rows[: sum(send)])
    out = source.new_empty(sum(receive) * width)
    sizes = [n * width for n in receive], [n * width for n in send]
    _finish(lambda: torch.distributed.all_to_all_single(out, source, *sizes, group, async_op=True), group, what)
    return out.view(rows.dtype).view(sum(receive), *rows.shape[1:])


def broadcast(x: Tensor, source: int, group: Any, what: str) -> Tensor:
    """``x`` of rank ``source`` of the world."""
    data = _bytes(x).clone()
    _finish(lambda: torch.distributed.broadcast(data, source, group, async_op=True), group, what)
    return data.view(x.dtype).view(x.shape)


def reduce(parts: Tensor, how: str) -> Tensor:
    """[ranks, …]  →  […]: ``sum``, ``max``, ``min`` or ``prod`` over the ranks in order. KeyError for another word."""
    wide = parts.float() if parts.dtype in (torch.bfloat16, torch.float16) else parts
    step = REDUCTIONS[how]
    total = wide[0]
    for part in wide[1:]:
        total = step(total, part)
    return total.to(parts.dtype)


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul,
}


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _width(rows: Tensor) -> int:
    """Bytes of a row of a tensor without rows."""
    count = rows.element_size()
    for size in rows.shape[1:]:
        count *= size
    return count


def _finish(begin: Callable[[], Any], group: Any, what: str) -> None:
    """Wait for a collective. `RankError` when it fails, or when a member has stopped: gloo itself tells only the ranks
    that are connected with it in this step, the others would wait until time is up."""
    try:
        work = begin()
        start, pause, looked = time.monotonic(), 2e-5, 0.0
        while not work.is_completed():
            time.sleep(pause)
            waited = time.monotonic() - start
            pause = min(pause * 1.5, 0.01)
            if waited - looked > _LOOK:
                looked = waited
                ranks.raise_if_stopped(group)
        work.wait()
    except RuntimeError as e:
        raise ranks.lost(group, what, e) from e
