"""Who is missing when a collective fails: every rank gets one sentence that names it, no rank waits for ever."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from cannopy.backend.cache.agree import FAILED, RankError, ranks_text

logger = logging.getLogger("cannopy.backend")

_GRACE = 5.0
"""Seconds in which ranks that have seen a failure say so; who says nothing is missing."""
_STOPPED, _MISSING = "cannopy/stopped", "cannopy/missing"


def lost(group: Any, what: str, error: BaseException) -> RankError:
    """The error of ``what``, a collective in ``group`` that ended with ``error``: names the ranks that did not come.

    gloo says only that a connection was closed or that time is up. The ranks of the group write into the store of
    torch.distributed that they have stopped. One that writes nothing has died or hangs; where all have written, what
    they found out counts: they stopped because of others.
    """
    c10d: Any = torch.distributed.distributed_c10d
    rank, members = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    try:
        store = c10d._get_default_store()
        store.set(f"{_STOPPED}/{rank}", what)
        missing = _silent(store, _STOPPED, members)
        if not missing:
            _silent(store, _MISSING, members, but=rank)
            missing = _told(store, members, rank)
        store.set(f"{_MISSING}/{rank}", json.dumps(missing))
        if rank == 0:  # its process often holds the store: the others are to hear before it ends
            others = [r for r in range(torch.distributed.get_world_size()) if r not in missing]
            _silent(store, _MISSING, others)
        failed = _reasons(store, members)
    except RuntimeError as e:
        gone = str(e).splitlines()[0]
        return RankError(f"rank {rank} stopped in {what} with {ranks_text(members)}: {reason}; the store of "
                         f"torch.distributed is gone as well, so rank 0 or torchrun has ended ({gone})")
    if failed and not missing:
        return RankError(f"rank {rank} stopped in {what} with {ranks_text(members)}: {failed}")
    who = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} died or hang{'s' * (len(missing) == 1)}"
    return RankError(f"rank {rank} stopped in {what} with {ranks_text(members)}: "
                     f"{who if missing else 'the connection was lost'} ({reason})")


def failed(reason: str) -> None:
    """Tell the other ranks that this one ends, and why: those that wait for it in a collective end as well."""
    c10d: Any = torch.distributed.distributed_c10d
    rank = torch.distributed.get_rank()
    try:
        store = c10d._get_default_store()
        if not store.check([f"{_STOPPED}/{rank}"]):  # a collective that failed has told already
            store.set(f"{FAILED}/{rank}", reason)
            store.set(f"{_MISSING}/{rank}", "[]")
            store.set(f"{_STOPPED}/{rank}", reason)
    except RuntimeError as e:
        logger.debug("could not tell the other ranks: %s", e)


def _reasons(store: Any, members: Sequence[int]) -> str:
    """Which members have failed by themselves, and why."""
    keys = {m: f"{FAILED}/{m}" for m in members}
    found = [f"rank {m} failed: {store.get(key).decode()}" for m, key in keys.items() if store.check([key])]
    return "; ".join(found)


def raise_if_stopped(group: Any) -> None:
    """RuntimeError when a rank of ``group`` has written that it stopped, or the store is gone."""
    c10d: Any = torch.distributed.distributed_c10d
    store = c10d._get_default_store()
    stopped = [m for m in torch.distributed.get_process_group_ranks(group) if store.check([f"{_STOPPED}/{m}"])]
    if stopped:
        raise RuntimeError(f"{ranks_text(stopped)} stopped")


def _silent(store: Any, stage: str, members: Sequence[int], but: int = -1) -> list[int]:
    """The members that have not written ``stage`` when the time is over."""
    end = time.monotonic() + _GRACE
    while True:
        silent = [m for m in members if m != but and not store.check([f"{stage}/{m}"])]
        if not silent or time.monotonic() >= end:
            return silent
        time.sleep(0.02)


def _told(store: Any, members: Sequence[int], rank: int) -> list[int]:
    """The ranks that other members found missing."""
    keys = [f"{_MISSING}/{m}" for m in members if m != rank]
    return sorted({r for key in keys if store.check([key]) for r in json.loads(store.get(key))})
