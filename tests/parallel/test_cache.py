"""Graphs with collectives through torchair's real cache: groups bound again after a restart, ranks that disagree."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy.backend import process_groups
from cannopy.backend.cache import list_entries, verify
from cannopy.backend.cache.key import differences, fingerprint
from cannopy.backend.options import BuildOptions
from cannopy.fx_passes.parallel import Layout, Parallel
from tests.parallel import programs, world

pytestmark = pytest.mark.usefixtures("activated")
TEXT = "ep=2,dp=2,dense_tp=2"


def _checked(rank: int, text: str, cache: Path | None) -> tuple[str, str]:
    """Compile, and run twice against the plain model; what the cache says."""
    layout, args = programs.layout(rank, text), programs.call(rank)
    compiled = programs.compiled(layout, args, cache)
    for _ in range(2):
        with torch.no_grad():
            want = programs.model()(*args)
        for ours, plain in zip(compiled(*args), want, strict=True):  # two partial sums, each rounded to bfloat16
            torch.testing.assert_close(ours.float(), plain.float(), rtol=2.0**-7, atol=2.0**-7)
    report = compiled.report["cache"]
    ops = compiled.report["ge_ops"]
    assert {k: v for k, v in ops.items() if k.startswith(("Hcom", "Moe"))} == {
        "HcomAllGather": 1, "HcomReduceScatter": 1, "HcomAllToAll": 2, "MoeDistributeDispatchV2": 1,
        "MoeDistributeCombineV2": 1}
    return report["status"], report["reason"]


def test_groups_are_bound_again_after_a_restart(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def cold(rank: int) -> tuple[str, str]:
        return _checked(rank, TEXT, cache)

    def restarted(rank: int) -> list[Any]:
        torch.distributed.new_group([0, 1])  # torch numbers the groups otherwise now
        return [_checked(rank, TEXT, cache), process_groups.find("cannopy.ep.0.1.2").group_name]

    assert [s for s, _ in world.run(2, cold, tmp_path / "out")] == ["miss", "miss"]
    assert len(list_entries(cache)) == 2
    assert world.run(2, restarted, tmp_path / "out") == [[("hit", ""), "3"]] * 2
    shutil.rmtree(next(e.path for e in list_entries(cache)))
    again = world.run(2, cold, tmp_path / "out")
    assert [s for s, _ in again] == ["miss", "miss"]
    assert any("all ranks build together" in reason for _, reason in again)
    assert [e.problem for e in verify(cache)] == [None, None]


def test_what_is_built_offline_hits_in_the_world(tmp_path: Path) -> None:
    """Without the other ranks, and for their ranks as well; nothing is run."""
    for rank in range(2):
        layout = Layout(Parallel.parse(TEXT), rank)
        with process_groups.offline(layout):
            programs.compiled(layout, programs.call(rank), tmp_path / "made", ranks=(rank,))
    shutil.copytree(tmp_path / "made", tmp_path / "cache")
    found = world.run(2, lambda rank: _checked(rank, TEXT, tmp_path / "cache"), tmp_path / "out")
    assert found == [("hit", "")] * 2


def test_the_layout_and_the_rank_are_in_the_key() -> None:
    model, args = programs.model(), programs.call(0)

    def key(text: str, rank: int) -> Any:
        return fingerprint(model, "forward", args, {}, BuildOptions(layout=Layout(Parallel.parse(text), rank)))

    assert key(TEXT, 1).key == key(TEXT, 1).key
    assert differences(key(TEXT, 0), key(TEXT, 1)) == ["topology (rank: 0 -> 1)"]
    assert differences(key(TEXT, 0), key("ep=4,dp=4", 0)) == [
        "topology (layout: ep=2,dp=2,dense_tp=2 -> ep=4,dp=4)"]
    alone = fingerprint(model, "forward", args, {}, BuildOptions())
    assert differences(alone, key(TEXT, 0)) == [
        "topology (layout: absent -> ep=2,dp=2,dense_tp=2; rank: absent -> 0; world: 1 -> absent)"]


@pytest.mark.parametrize("cached", [True, False])
def test_ranks_with_other_shapes_are_told_before_anything_is_compiled(cached: bool, tmp_path: Path) -> None:
    """Also without a cache: a first step would wait for collectives that do not meet."""
    def work(rank: int) -> None:
        args = programs.call(rank, 4 if rank != 1 else 6)
        programs.compiled(programs.layout(rank, "ep=4,dp=4,dense_tp=2"), args, tmp_path / "cache" if cached else None)

    for text in world.run(4, work, tmp_path / "out", raises=True):
        assert text.startswith("RankError: rank 1 and rank 0 compile Whole.forward differently: inputs args[0]: ")
        assert "[4, 1024]" in text.split(" on rank 0, ")[0]
        assert "[6, 1024]" in text.split(" on rank 0, ")[1]
    assert list_entries(tmp_path / "cache") == []


@pytest.mark.parametrize("moment", ["compiling", "running"])
def test_a_rank_that_dies_ends_the_others_and_leaves_nothing_half_written(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cannopy.backend.ranks._GRACE", 1.0)

    def work(rank: int) -> None:
        layout, args = programs.layout(rank, TEXT), programs.call(rank)
        if moment == "running":
            compiled = programs.compiled(layout, args, tmp_path / "cache", cache_timeout=5.0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "running":
            compiled(*args)
        else:
            programs.compiled(layout, args, tmp_path / "cache", cache_timeout=2.0)

    start = time.monotonic()
    text, _ = world.run(2, work, tmp_path / "out", seconds=30.0, raises=True, killed=(1,))
    assert time.monotonic() - start < 20.0
    assert text.startswith("RankError: rank 0 ")
    assert "rank 1" in text
    assert [e.problem for e in verify(tmp_path / "cache")] == [None] * (2 if moment == "running" else 0)
    if moment == "running":
        assert "stopped in GE op Hcom" in text
        assert "rank 1 has died or hangs" in text
