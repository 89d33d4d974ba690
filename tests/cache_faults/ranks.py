"""Ranks of torch.distributed (gloo) on one machine, forked from a process that has imported torch."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from cannopy.backend.build import build
from tests.backend.programs import Tiny, check_same_as_eager, eager, example, look, make_output, tiny_program
from tests.cache_faults.kills import start, wait


class OwnGraph(Tiny):
    """A model whose code can ask for the rank."""

    def forward(self, x: torch.Tensor, cache: Any, flag: bool = False, mask: Any = None) -> dict[str, Any]:
        assert torch.distributed.get_rank() >= 0
        return super().forward(x, cache, flag, mask)


def compiled_by(cls: type[Tiny], cache: Path, timeout: float = 20.0, during: Callable[[], None] | None = None,
                ranks: tuple[int, ...] | None = None, engine: Literal["eager", "torchair"] = "eager") -> dict[str, str]:
    """Look up as a rank, build on a miss (``during`` runs while the right to build is held); the cache's report."""
    torch.manual_seed(0)
    model = cls().eval()
    x, state = example()
    options = replace(eager(cache, cache_timeout=timeout, ranks=ranks), engine=engine)
    found = look(model, (x, state), options)
    compiled = found.compiled
    if compiled is None:
        with found:
            if during is not None:
                during()
            program = tiny_program(model, x, state)
            compiled = build(program, model, "forward", (x, state), {}, options, found, {}, make_output)
    check_same_as_eager(compiled, model, x, state)
    return dict(compiled.report["cache"])


def launch(world: int, work: Callable[[int], object], out: Path) -> list[int]:
    """Start `work` in ``world`` ranks; what each returns is written to ``out``, an error as ``{"error": text}``."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def run(rank: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        began = time.monotonic()
        try:
            result = work(rank)
        except Exception as e:  # noqa: BLE001 the error is the result
            result = {"error": f"{type(e).__name__}: {e}"}
        (out / f"{rank}.json").write_text(json.dumps({"result": result, "seconds": time.monotonic() - began}))

    out.mkdir(exist_ok=True)
    return [start(lambda r=rank: run(r)) for rank in range(world)]


def results(world: int, work: Callable[[int], object], out: Path, killed: tuple[int, ...] = ()) -> list[Any]:
    """`launch`, wait for all, and what each rank returned; None for a rank that is to be killed."""
    pids = launch(world, work, out)
    codes = [wait(pid) for pid in pids]
    assert codes == [-9 if r in killed else 0 for r in range(world)], codes
    return [None if r in killed else json.loads((out / f"{r}.json").read_text())["result"] for r in range(world)]
