"""Ranks of torch.distributed (gloo) on one machine, forked from the test's process, which has imported torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.cache_faults.kills import start


class RankFailedError(AssertionError):
    """A rank raised, or did not end in time; the text has the traces of all."""


def run(world: int, work: Callable[[int], Any], out: Path, seconds: float = 60.0, raises: bool = False,
        killed: tuple[int, ...] = ()) -> list[Any]:
    """What ``work(rank)`` gives in each of ``world`` ranks; `RankFailedError` unless all end well in ``seconds``.

    ``raises``: an error of a rank is its result, as text, and ``killed`` are ranks that need not end at all.
    """
    out.mkdir(exist_ok=True)
    pids = [start(lambda r=r, port=_port: _rank(r, world, port, work, out)) for _port in [_free_port()]
            for r in range(world)]
    codes: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while not codes.keys() >= set(range(world)) - set(killed) and time.monotonic() < end:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[rank] = None
    found = [_result(out / f"{rank}.pkl") for rank in range(world)]
    hung = [rank for rank, code in codes.items() if code is None and rank not in killed]
    failed = [text for text, _ in found if text and not raises]
    if hung or failed:
        raise RankFailedError("\n".join([f"hung: {hung}", *failed]))
    return [value for _, value in found]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(rank: int, world: int, port: int, work: Callable[[int], Any], out: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                                         timeout=timedelta(seconds=30))
    path = out / f"{rank}.pkl"
    try:
        path.write_bytes(pickle.dumps(("", work(rank))))
    except BaseException as e:  # noqa: BLE001 the error is the result
        path.write_bytes(pickle.dumps((f"rank {rank}:\n{traceback.format_exc()}", f"{type(e).__name__}: {e}")))


def _result(path: Path) -> tuple[str, Any]:
    if not path.exists():
        return "", None
    found: tuple[str, Any] = pickle.loads(path.read_bytes())
    return found
