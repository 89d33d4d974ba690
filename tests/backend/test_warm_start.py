"""A restart runs neither Dynamo nor AOT nor a pass, for everything that one process compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backend import processes
from tests.backend.warm import PARTS

MISSES = {"decode": "miss", "prefill": "miss", "other weights": "hit", "draft": "miss"}
"""The second instance of a class takes the entry of the first, in the process that made it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("cache")
    return [processes.run(folder, "tests.backend.warm") for _ in range(2)]


def test_a_restart_hits_for_every_model_and_phase(runs) -> None:
    cold, warm = runs
    assert {name: case["status"] for name, case in cold["cases"].items()} == MISSES
    assert {case["status"] for case in warm["cases"].values()} == {"hit"}
    assert [c["key"] for c in cold["cases"].values()] == [c["key"] for c in warm["cases"].values()]
    assert cold["cases"]["prefill"]["key"] != cold["cases"]["decode"]["key"] == cold["cases"]["other weights"]["key"]
    assert "phase: decode -> prefill" in cold["cases"]["prefill"]["reason"]


def test_nothing_is_captured_or_lowered_again(runs) -> None:
    cold, warm = runs
    assert {name.partition(":")[0] for name in cold["calls"]} == set(PARTS)  # the count sees what it should see
    assert warm["calls"] == {}


def test_results_and_caches_are_those_of_the_loaded_weights(runs) -> None:
    for run in runs:
        assert all(case["error"] <= 2**-5 for case in run["cases"].values())  # 8 bits of numbers up to 4
    assert [c["error"] for c in runs[0]["cases"].values()] == [c["error"] for c in runs[1]["cases"].values()]


def test_derived_weights_of_one_model_are_in_memory_once(runs) -> None:
    for run in runs:
        decode, prefill, other, draft = (case["weights"] for case in run["cases"].values())
        assert decode["derived"] == prefill["derived"] > 0
        assert decode["bytes"] == other["bytes"] == prefill["shared_bytes"] > 0
        assert prefill["bytes"] == decode["shared_bytes"] == other["shared_bytes"] == 0
        assert 0 < draft["shared_bytes"] < draft["bytes"]  # the head that both have


def test_a_hit_says_what_it_spent(runs) -> None:
    steps = runs[1]["cases"]["decode"]["steps"]
    assert steps == ["prepare", "lookup", *(f"lookup: {step}" for step in ("key", "read", "weights", "torchair"))]
