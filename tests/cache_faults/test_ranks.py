"""Ranks that compile together: what they share, what they agree on, and what they say when one is missing."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.device_mesh
import transformers

from cannopy.backend.cache import agree, claim, key, list_entries, verify
from cannopy.backend.options import BuildOptions
from tests.backend.programs import Tiny, eager, example, look, tiny
from tests.cache_faults.ranks import OwnGraph, compiled_by, results


def test_equal_graphs_share_an_entry(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cold = results(2, lambda rank: compiled_by(Tiny, cache), tmp_path / "out")
    assert sorted(r["status"] for r in cold) == ["hit", "miss"]
    assert len(list_entries(cache)) == 1
    warm = results(2, lambda rank: compiled_by(Tiny, cache), tmp_path / "out")
    assert [r["status"] for r in warm] == ["hit", "hit"]
    alone = look(tiny(), example(), eager(cache))
    assert alone.status == "miss"
    assert "world: 2 -> 1" in alone.reason


@pytest.mark.slow
def test_ranks_share_what_torchair_stored(tmp_path: Path) -> None:
    """torchair has the rank in its paths."""
    cache = tmp_path / "cache"
    found = results(2, lambda rank: compiled_by(Tiny, cache, 120.0, engine="torchair"), tmp_path / "out")
    assert sorted(r.get("status", r) for r in found) == ["hit", "miss"]


def test_graphs_that_can_depend_on_the_rank_are_built_together(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def work(rank: int) -> list[dict[str, str]]:
        cold = compiled_by(OwnGraph, cache)
        return [cold, compiled_by(OwnGraph, cache)]

    first = results(2, work, tmp_path / "out")
    assert [[c["status"] for c in r] for r in first] == [["miss", "hit"]] * 2
    entries = {e.key: e for e in list_entries(cache)}
    assert set(entries) == {r[0]["key"] for r in first}
    kept = entries[first[0][0]["key"]]
    inode = kept.path.stat().st_ino
    shutil.rmtree(entries[first[1][0]["key"]].path)
    again = results(2, lambda rank: compiled_by(OwnGraph, cache), tmp_path / "out")
    assert [r["status"] for r in again] == ["miss", "miss"]
    assert again[0]["reason"].startswith("rank 1 had no entry (changed: topology (rank: 0 -> 1)")
    assert "all ranks build together" in again[0]["reason"]
    assert kept.path.stat().st_ino == inode
    assert [e.problem for e in verify(cache)] == [None, None]


@pytest.mark.parametrize("model", [Tiny, OwnGraph])
def test_a_rank_that_is_killed_while_it_builds_is_named(tmp_path: Path, model: type[Tiny]) -> None:
    """Where the graphs are equal the other rank takes the build over, and says then that one is missing."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> Any:
        began = time.monotonic()
        try:
            return compiled_by(model, tmp_path / "cache", timeout=2.0, during=die if rank == 1 else None)
        except agree.RankError as e:
            return str(e), time.monotonic() - began

    if model is Tiny:  # rank 1 is the one that gets the lock
        work = holding_back(0, work)
    (message, seconds), _ = results(2, work, tmp_path / "out", killed=(1,))
    assert "for rank 1 to finish" in message
    assert f"{model.__name__}.forward" in message
    assert "Options.cache_timeout" in message
    assert 1.9 < seconds < 8
    assert [e.problem for e in verify(tmp_path / "cache")] == [None]


def test_the_rank_that_holds_the_store_stays_until_others_know_who_is_missing(tmp_path: Path) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank: int) -> Any:
        return compiled_by(OwnGraph, tmp_path / "cache", (1.5, 4.0, 4.0)[rank], die if rank == 2 else None)

    first, second, _ = results(3, work, tmp_path / "out", killed=(2,))
    assert "rank 0 waited 2 s for rank 2 to finish" in first["error"]
    assert "did not compile OwnGraph.forward: rank 0 waited 2 s for rank 2 to finish" in second["error"]


def holding_back(rank: int, work: Callable[[int], Any]) -> Callable[[int], Any]:
    """`work`, in which ``rank`` comes late to the build locks."""

    def late(which: int) -> Any:
        original = claim.build_turn
        if which == rank:
            claim.build_turn = lambda path, timeout: (time.sleep(0.7), original(path, timeout))[1]
        return work(which)

    return late


def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no converter for aten.nothing")

    def work(rank: int) -> Any:
        return compiled_by(OwnGraph, tmp_path / "cache", during=fail if rank == 1 else None)

    began = time.monotonic()
    first, second = results(2, work, tmp_path / "out")
    assert time.monotonic() - began < 10
    assert second["error"] == "RuntimeError: no converter for aten.nothing"
    assert "RankError: rank 1 (process " in first["error"]
    assert "did not compile OwnGraph.forward: RuntimeError: no converter for aten.nothing" in first["error"]


def test_ranks_that_compile_different_things_are_told(tmp_path: Path) -> None:
    found = results(2, lambda rank: compiled_by((Tiny, OwnGraph)[rank], tmp_path / "cache"), tmp_path / "out")
    assert all("rank 1 OwnGraph.forward" in r["error"] or "rank 0 Tiny.forward" in r["error"] for r in found)
    assert all("Options.ranks" in r["error"] for r in found)


def test_a_rank_may_compile_alone(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        return compiled_by(OwnGraph, tmp_path / "cache", ranks=(0,)) if rank == 0 else None

    alone, _ = results(2, work, tmp_path / "out")
    assert alone["status"] == "miss"


def test_ranks_and_versions_as_text() -> None:
    cann = ["9.0", "9.0", "9.0", "9.1", "9.0"]
    words = {r: agree.Word(r, "hit", versions={"torch": "2.13.0", "cann": v}) for r, v in enumerate(cann)}
    assert agree.different_versions(words) == ["cann 9.0 on ranks 0-2, 4, 9.1 on rank 3"]
    assert agree.ranks_text([7]) == "rank 7"


def _on_rank(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + torch.distributed.get_rank())


class Asks(torch.nn.Module):
    """The rank decides what it computes, behind a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _on_rank(x)


class Reduces(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def hooked() -> torch.nn.Module:
    model = Plain()
    model.register_forward_hook(lambda module, args, out: _on_rank(out))
    return model


def holding_a_mesh() -> torch.nn.Module:
    model = Plain()
    model.mesh = object.__new__(torch.distributed.device_mesh.DeviceMesh)
    return model


def stock() -> torch.nn.Module:
    with torch.device("meta"):
        config = transformers.Qwen3Config(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=32, vocab_size=100,
        )
        return transformers.Qwen3ForCausalLM(config)


def stock_with_a_hook() -> torch.nn.Module:
    model = stock()
    model.lm_head.register_forward_hook(lambda module, args, out: out)
    return model


@pytest.mark.parametrize(
    ("make", "own"),
    [(Plain, False), (Asks, True), (Reduces, True), (hooked, True), (holding_a_mesh, True), (stock, False),
     (stock_with_a_hook, True)],
)
def test_the_rank_is_in_the_key_where_the_graph_can_depend_on_it(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], torch.nn.Module], own: bool
) -> None:
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    model = make()
    found = key.fingerprint(model, "forward", (torch.ones(2, device="meta"),), {}, BuildOptions())
    assert ("rank" in found.details["topology"]) is own
