"""Process groups of torch.distributed for the groups of a layout, under names that are the same in every process.

torch numbers groups in the order in which a process makes them, so its own names do not survive a restart. Here a group
is registered a second time under `fx_passes.parallel.Group.name`, which is also its tag: graphs find it by
``_resolve_process_group(name)``, code that torchair has stored by ``_find_pg_by_ranks_and_tag(name, ranks)``.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cannopy.backend import hccl_groups
from cannopy.backend.cache import agree
from cannopy.fx_passes.parallel import Group, Layout, Parallel, ParallelError

FAKE = "fake"
"""torch's backend that moves nothing."""


def started() -> bool:
    """Whether torch.distributed has been initialised in this process."""
    dist = torch.distributed
    return bool(dist.is_available() and dist.is_initialized())


def is_fake() -> bool:
    """Whether the process groups of this process are stand-ins that move nothing."""
    return started() and str(torch.distributed.get_backend()) == FAKE


def layout_of(parallel: Parallel | None, rank: int | None) -> Layout | None:
    """What ``parallel`` is for this process; None for one die. ``rank`` None is that of torch.distributed.

    Raises:
        ParallelError: the world has another size, ``rank`` is not this process's, or there is no rank to take.
    """
    if parallel is None or parallel.dies == 1:
        return None
    if not started():
        if rank is None:
            raise ParallelError(f"{parallel} has {parallel.dies} ranks, and this process is none of them: start it with"
                                f" torchrun --nproc-per-node {parallel.dies}, or name the rank to build for")
        return Layout(parallel, rank)
    dist = torch.distributed
    world, here = dist.get_world_size(), dist.get_rank()
    if world != parallel.dies:
        raise ParallelError(f"{parallel} is for {arithmetic(parallel)} dies, and torch.distributed has {world} "
                            f"rank{'s' * (world > 1)}: start {parallel.dies}, or choose other sizes")
    if rank is not None and rank != here:
        raise ParallelError(f"rank {rank} is asked for in the process of rank {here}; leave the rank out")
    return Layout(parallel, here)


def arithmetic(parallel: Parallel) -> str:
    """How many dies there are, and why: ``max(dp·attn_tp = 4·2, ep·moe_tp = 4·1) = 8``."""
    p = parallel
    kvp = ("·kvp", f"·{p.kvp}") if p.kvp > 1 else ("", "")
    terms = [f"dp·attn_tp{kvp[0]} = {max(p.dp, 1)}·{p.attn_tp}{kvp[1]}", f"ep·moe_tp = {p.ep}·{p.moe_tp}"]
    terms += [f"{name} = {getattr(p, name)}" for name in ("o_proj_tp", "dense_tp", "embed_tp", "lm_head_tp", "cp")
              if getattr(p, name) > 1]
    return f"max({', '.join(terms)}) = {p.dies}"


def ensure(layout: Layout, timeout: float, wait: float) -> None:
    """Create the groups of ``layout`` that this process does not have yet. Every rank calls this, with one layout.

    A collective in a group gives up after ``timeout`` seconds; ``wait`` is how long the other ranks may take to come.

    Raises:
        ParallelError: the world is not that of the layout.
        agree.RankError: a rank did not come, or came with another layout; names it.
    """
    layout_of(layout.parallel, layout.rank)
    missing = missing_groups(layout)
    if is_fake():
        mine = {g.name for g in own_groups(layout)}
        for group in missing:
            if group.name in mine:
                _create(group, timeout)
        return
    if missing:
        _agree(layout, missing, wait)
    for group in missing:
        try:
            _create(group, timeout)
        except RuntimeError as e:  # torch.distributed's errors; gloo connects to every member
            raise agree.RankError(f"rank {layout.rank} could not connect to {agree.ranks_text(group.ranks)} for "
                                  f"{group.kind}={group.size}: {_first_line(e)}") from e


def _agree(layout: Layout, missing: list[Group], wait: float) -> None:
    """Every rank is here with this layout and lacks the same groups, or `agree.RankError`."""
    peers = agree.peers(f"the groups of {layout.parallel}", None, wait)
    if peers is None:
        return
    said = " ".join(sorted({g.kind for g in missing})) or "none"
    words = peers.exchange(agree.JOINED, said)
    unlike = {rank: word.status for rank, word in words.items() if word.status != said}
    if unlike:
        raise agree.RankError(f"rank {layout.rank} has to create the groups {said}, "
                              + ", ".join(f"rank {r} {kinds}" for r, kinds in unlike.items())
                              + ": some ranks have compiled for a layout that the others have not seen")


def own_groups(layout: Layout) -> list[Group]:
    """The groups that the rank is in, in the order in which they are created."""
    return [g for g in layout.all_groups() if layout.rank in g.ranks]


def missing_groups(layout: Layout) -> list[Group]:
    """Groups to create, in order: all of a kind where this rank lacks its own, since all ranks make all of a kind."""
    lacks = {g.kind for g in own_groups(layout) if find(g.name) is None}
    return [g for g in layout.all_groups() if g.kind in lacks]


def find(name: str) -> Any:
    """The process group registered as ``name``, or None."""
    if not started():
        return None
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError, LookupError):
        return None


def _create(group: Group, timeout: float) -> None:
    """One torch.distributed group, a collective over the whole world, registered under the stable name."""
    c10d: Any = torch.distributed.distributed_c10d
    make = c10d._new_group_with_tag
    options: dict[str, Any] = {}
    on_npu = "hccl" in str(torch.distributed.get_backend())
    if on_npu:
        key = "backend_options" if "backend_options" in inspect.signature(make).parameters else "pg_options"
        options[key] = hccl_groups.options(group)
    made = make(list(group.ranks), timeout=datetime.timedelta(seconds=timeout), pg_tag=group.name, **options)
    if torch.distributed.get_rank() not in group.ranks:
        return
    _register(group.name, made)
    if on_npu:
        hccl_groups.name(made, group)


def _register(name: str, process_group: Any) -> None:
    importlib.import_module("torch._C._distributed_c10d")._register_process_group(name, process_group)


@contextmanager
def offline(layout: Layout) -> Iterator[None]:
    """A world of stand-ins inside the block, in which graphs with the groups of ``layout`` can be lowered, not run.

    Nothing is left of it afterwards. `ParallelError` where torch.distributed is in use.
    """
    if started():
        raise ParallelError("torch.distributed is initialised: its own groups have to be used")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist = torch.distributed
    dist.init_process_group(FAKE, store=fake.FakeStore(), rank=layout.rank, world_size=layout.parallel.dies)
    try:
        ensure(layout, 1.0, 1.0)
        yield
    finally:
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
