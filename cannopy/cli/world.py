"""The ranks of ``torchrun`` that run one command together: joining, what each may print, what all conclude."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cannopy.errors import CannopyError
from cannopy.options import Options, sizes_of

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.frontend.sources import LoadedModel
    from cannopy.fx_passes.parallel import Layout


AUTO = "auto"
"""What ``--parallel`` is where the cost model is to choose the layout."""


def add_layout_arguments(group: argparse._ArgumentGroup, running: bool = False) -> None:
    """``--parallel``, and ``--rank`` for the verbs that run nothing."""
    group.add_argument("--parallel", metavar="K=N,…|FILE",
                       help="spread the model over dies: ep, dp, attn_tp, o_proj_tp, dense_tp, embed_tp, lm_head_tp, "
                       "moe_tp, cp, kvp, sp, a YAML file with them, or (of run, compile and estimate) auto")
    if not running:
        group.add_argument("--rank", type=int, metavar="R", help="the die of --parallel to build for (0)")
        return
    group.add_argument("--group-timeout", type=float, default=300.0, metavar="S",
                       help="seconds that a rank of --parallel waits for the others (300)")


def layout_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that `add_layout_arguments` stands for."""
    parallel = getattr(args, "parallel", None)
    if not parallel:
        if getattr(args, "rank", None) is not None:
            raise CannopyError(f"--rank {args.rank} without --parallel", "name the layout that the rank is in")
        return {}
    if parallel == AUTO:
        raise CannopyError("--parallel auto: only run, compile and estimate choose a layout",
                           "cannopy estimate MODEL --parallel auto --dies N prints one to name here")
    sizes = sizes_of(parallel)
    if sizes is not None and sizes.cp > 1 and args.phase != "prefill":
        raise CannopyError(f"cp={sizes.cp} splits a prompt over dies, and a decode step has none to split",
                           f"--phase prefill; decode reads the caches in a layout without cp={sizes.cp}")
    timeout = getattr(args, "group_timeout", None)
    if timeout is not None:
        return {"parallel": parallel, "group_timeout": timeout, "cache_timeout": timeout}
    given = getattr(args, "rank", None)
    return {"parallel": parallel, "rank": 0 if given is None else given}


def layout_of(args: argparse.Namespace) -> Layout | None:
    """The layout that the arguments of a verb that runs nothing name; None for one die, and where none is chosen."""
    from cannopy.fx_passes.parallel import Layout

    parallel = getattr(args, "parallel", None)
    sizes = None if not parallel or parallel == AUTO else sizes_of(parallel)
    return None if sizes is None or sizes.dies == 1 else Layout(sizes, getattr(args, "rank", None) or 0)


def with_part(loaded: LoadedModel, layout: Layout | None) -> LoadedModel:
    """``loaded`` with the caches that a die of ``layout`` is called with: of kvp, a part of the rows, of attn_tp a part
    of the heads."""
    from cannopy.frontend.serving import CachePart, ServingCase

    if layout is None or not isinstance(loaded.case, ServingCase):
        return loaded
    part = CachePart(layout.parallel.kvp, layout.position("kvp"))
    if layout.parallel.attn_tp > 1 and loaded.case.cache_heads > 1:
        part = replace(part, groups=layout.parallel.attn_tp, group=layout.position("attn_tp"))
    case = replace(loaded.case, part=part)
    return replace(loaded, case=case, make_inputs=case.inputs)


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks that run the command; one rank when there is no layout."""

    layout: Layout | None

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.layout.rank if self.layout else 0

    @property
    def replica(self) -> int:
        """Which of the data-parallel requests are this rank's: ranks that share heads, or a prompt, have the same."""
        return int(self.rank * self.layout.parallel.replicas) // self.layout.parallel.dies if self.layout else 0

    def console(self, console: Console) -> Console:
        """``console`` on rank 0, one that shows nothing on the others."""
        if self.rank == 0:
            return console
        from rich.console import Console

        return Console(quiet=True)

    def exchange(self, what: str, mine: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What every rank has found out about ``what``, by rank. `RankError` names a rank that does not come."""
        if self.layout is None:
            return [dict(mine)]
        from cannopy.backend.cache import agree

        peers = agree.peers(what, None, timeout)
        if peers is None:
            return [dict(mine)]
        words = peers.exchange(agree.ENDED, json.dumps(mine))
        return [json.loads(words[rank].status) for rank in sorted(words)]


@contextlib.contextmanager
def joined(options: Options) -> Iterator[World]:
    """The world that ``options.parallel`` needs, for as long as the block lasts.

    An error is told to the other ranks, so that none waits for this one; then the process ends at once, because a
    collective that is still under way would hold it.

    Raises:
        CannopyError: the command was not started by torchrun, or not with as many ranks as there are dies.
    """
    if options.parallel is None or options.parallel.dies == 1:
        yield World(None)
        return
    import torch

    from cannopy.backend import process_groups, ranks

    _start(options)
    try:
        layout = process_groups.layout_of(options.parallel, None)
        yield World(layout)
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks wait for this one
        ranks.failed(f"{type(error).__name__}: {error}".splitlines()[0])
        from cannopy.cli import failed

        code = failed(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    torch.distributed.destroy_process_group()


def _start(options: Options) -> None:
    """Initialise torch.distributed as torchrun says."""
    import torch

    from cannopy.backend.process_groups import arithmetic, started
    from cannopy.backend.torchair import have_npu

    assert options.parallel is not None
    dies, dist = options.parallel.dies, torch.distributed
    if not dist.is_available():
        raise CannopyError("this torch is built without torch.distributed", "install a build that has it")
    world = os.environ.get("WORLD_SIZE")
    if world is None or "RANK" not in os.environ:
        raise CannopyError(f"{options.parallel} needs {dies} ranks, and this process is alone",
                           f"torchrun --nproc-per-node {dies} -m cannopy run …")
    if int(world) != dies:
        raise CannopyError(f"{options.parallel} is for {arithmetic(options.parallel)} dies, and torchrun has started "
                           f"{world}", f"torchrun --nproc-per-node {dies}, or other sizes")
    if started():
        return
    if have_npu():
        npu: Any = getattr(torch, "npu", None)
        npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("hccl" if have_npu() else "gloo", timeout=timedelta(seconds=options.group_timeout))
