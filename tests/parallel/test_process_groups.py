"""Process groups of a layout: names, reuse, order, and what is said when ranks are missing or disagree."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy.backend import process_groups, ranks
from cannopy.backend.cache.agree import RankError
from cannopy.backend.host import exchange
from cannopy.fx_passes.parallel import Layout, Parallel, ParallelError
from tests.parallel import programs, world

DEPLOYED = Parallel.parse("ep=128,dp=128,o_proj_tp=8,dense_tp=4,embed_tp=16,lm_head_tp=16")
c10d: Any = torch.distributed.distributed_c10d


def test_offline_groups_are_found_by_name_and_by_tag_and_leave_nothing() -> None:
    for rank in (0, 77):
        layout = Layout(DEPLOYED, rank)
        with process_groups.offline(layout):
            assert torch.distributed.get_rank() == rank
            for group in process_groups.own_groups(layout):
                found = process_groups.find(group.name)
                assert c10d._find_pg_by_ranks_and_tag(group.name, list(group.ranks)) is found
                assert c10d.get_process_group_ranks(found) == list(group.ranks)
            assert process_groups.missing_groups(layout) == []
            with pytest.raises(exchange.GroupError, match="built without the other ranks"):
                exchange.group_of(layout.group("ep").name)
        assert not process_groups.started()
        assert process_groups.find(layout.group("ep").name) is None
    with pytest.raises(exchange.GroupError, match="is not initialised"):
        exchange.group_of("tag=a;rank_list=0,1")


def test_which_rank() -> None:
    assert process_groups.layout_of(None, None) is None
    assert process_groups.layout_of(Parallel(), None) is None
    assert process_groups.layout_of(DEPLOYED, 5) == Layout(DEPLOYED, 5)
    with pytest.raises(ParallelError, match="torchrun --nproc-per-node 128, or name the rank"):
        process_groups.layout_of(DEPLOYED, None)
    with process_groups.offline(Layout(Parallel(ep=4), 2)):
        assert process_groups.layout_of(Parallel(ep=4), None) == Layout(Parallel(ep=4), 2)
        with pytest.raises(ParallelError, match=r"dp·attn_tp = 4·2, ep·moe_tp = 4·1\) = 8 dies, .* has 4 ranks"):
            process_groups.layout_of(Parallel(ep=4, dp=4, attn_tp=2), None)
        with pytest.raises(ParallelError, match="rank 1 is asked for in the process of rank 2"):
            process_groups.layout_of(Parallel(ep=4), 1)
        with pytest.raises(ParallelError, match="its own groups have to be used"), \
                process_groups.offline(Layout(DEPLOYED, 0)):
            pass


def test_groups_are_made_once_and_names_do_not_depend_on_what_was_made_before(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        if rank % 2 == 0:
            torch.distributed.new_group([0, 2], use_local_synchronization=True)
        first = Layout(Parallel.parse("ep=4,dp=4,dense_tp=2"), rank)
        process_groups.ensure(first, 10.0, 10.0)
        made = {g.name: process_groups.find(g.name) for g in process_groups.own_groups(first)}
        more = Layout(Parallel.parse("ep=4,dp=4,dense_tp=2,o_proj_tp=4"), rank)
        process_groups.ensure(more, 10.0, 10.0)
        process_groups.ensure(more, 10.0, 10.0)
        assert all(process_groups.find(name) is group for name, group in made.items())
        return [g.name for g in process_groups.own_groups(more)]

    found = world.run(4, work, tmp_path)
    experts = ["cannopy.ep.0.1.4", "cannopy.ep_routed.0.1.4"]
    assert found[0] == ["cannopy.o_proj_tp.0.1.4", "cannopy.dense_tp.0.1.2", *experts]
    assert found[3] == ["cannopy.o_proj_tp.0.1.4", "cannopy.dense_tp.2.1.2", *experts]


def test_ranks_with_other_layouts_or_none_are_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        text = "ep=2,dp=2" if rank == 0 else "dense_tp=2,dp=2"
        process_groups.ensure(Layout(Parallel.parse(text), rank), 10.0, 10.0)

    for rank, text in enumerate(world.run(2, work, tmp_path, raises=True)):
        assert text.startswith("RankError: ranks compile different things at the same time")
        assert f"rank {rank} the groups of" in text

    def one_stays_away(rank: int) -> None:
        if rank != 2:
            process_groups.ensure(Layout(Parallel.parse("ep=4,dp=4"), rank), 1.0, 1.0)
        time.sleep(2.0 if rank == 2 else 0.5)

    found = world.run(4, one_stays_away, tmp_path, raises=True)
    assert found[2] is None
    for rank in (0, 1, 3):
        lost = rank != 0 and "lost the store of the process group" in found[rank]  # rank 0, which holds it, was first
        assert lost or "rank 2" in found[rank]
        assert "the groups of ep=4,dp=4" in found[rank]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_in_a_collective_is_named(how: str, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on ranks that had no collective with it."""
    monkeypatch.setattr(ranks, "_GRACE", 1.0)

    def work(rank: int) -> None:
        layout = Layout(Parallel.parse("dp=4,dense_tp=2,o_proj_tp=4"), rank)
        process_groups.ensure(layout, 2.0, 10.0)
        if rank == 3:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30.0)
        for kind in ("dense_tp", "o_proj_tp"):
            exchange.all_gather(torch.ones(2), exchange.group_of(layout.group(kind).name), kind)

    start = time.monotonic()
    found = world.run(4, work, tmp_path, seconds=20.0, raises=True, killed=(3,))
    assert time.monotonic() - start < 12.0
    for rank in (0, 1, 2):
        assert found[rank].startswith(f"RankError: rank {rank} stopped in "), found[rank]
        assert ": rank 3 has died or hangs (" in found[rank]


def test_the_reason_of_a_rank_that_fails_reaches_the_others(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        layout = Layout(Parallel.parse("dp=2,dense_tp=2"), rank)
        process_groups.ensure(layout, 30.0, 10.0)
        if rank == 1:
            ranks.failed("ValueError: no such token")
            time.sleep(3.0)
            return
        exchange.all_gather(torch.ones(2), exchange.group_of(layout.group("dense_tp").name), "this step")

    first, _ = world.run(2, work, tmp_path, seconds=20.0, raises=True)
    assert first == ("RankError: rank 0 stopped in this step with ranks 0-1: rank 1 failed: "
                     "ValueError: no such token")


@pytest.mark.usefixtures("activated")
def test_a_killed_rank_ends_the_step_of_a_compiled_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step runs on all ranks, rank 1 is killed before the second."""
    monkeypatch.setattr(ranks, "_GRACE", 1.0)

    def work(rank: int) -> None:
        method = programs.compiled(programs.layout(rank, "ep=4,dp=4,dense_tp=2"), programs.call(rank), None)
        method(*programs.call(rank))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        method(*programs.call(rank))

    found = world.run(4, work, tmp_path, seconds=120.0, raises=True, killed=(1,))
    for rank in (0, 2, 3):
        assert found[rank].startswith(f"RankError: rank {rank} stopped in "), found[rank]
        assert "rank 1 has died or hangs" in found[rank] or (rank and "rank 0 or torchrun has ended" in found[rank])


def test_no_group_no_exchange(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        with pytest.raises(exchange.GroupError, match="here: nobody has created it") as caught:
            exchange.group_of("cannopy.ep.0.1.2")
        return type(caught.value).__name__

    assert world.run(2, work, tmp_path) == ["GroupError"] * 2
    assert issubclass(RankError, RuntimeError)
