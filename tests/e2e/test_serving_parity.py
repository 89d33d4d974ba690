"""Every zoo model in serving form, compiled: as near to float64 as plain bf16, no write outside of the step's slots.

A graph is compiled once per model and phase and then called with many data: ragged lengths, lengths at the end of a
block, padding, empty and full requests. `benchmarks.serving_parity` does the same for all batches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cannopy
from benchmarks.serving_parity import BLOCK, PHASES, SHAPES, call, case, compiled, measure
from cannopy.frontend.generation import Phase
from cannopy.frontend.serving import ServingCase
from cannopy.parity import serving

CHOSEN = {("prefill", "deepseek-v3.2"): 8, ("prefill", "qwen2.5"): 1, ("decode", "deepseek-r1"): 8,
          ("decode", "kimi-k2"): 8, ("decode", "longcat-flash"): 1}
"""Batch of those that are not measured with 3."""
CASES = [(name, phase) for name in SHAPES for phase in PHASES]


@cache
def graph(name: str, phase: Phase) -> tuple[ServingCase, cannopy.Compiled]:
    batch = CHOSEN.get((phase, name), 3)
    one = case(name, batch, dict(SHAPES[name])[batch], phase)
    return one, compiled(one, phase, cannopy.Options(use_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), CASES)
def test_parity(name: str, phase: Phase) -> None:
    one, found = graph(name, phase)
    report = measure(one, phase, found)
    assert report.failures == []
    assert all(e.plain.median < 0.1 for e in report.errors), "the runs that are compared are of the same calls"
    assert found.report.cache_copies == 0
    assert {w.name for w in report.writes} == {n for n, _ in serving.tensors(one.new_requests().cache)}
    assert all(w.rows > 0 for w in report.writes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), CASES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_write_outside_of_the_slots(name: str, phase: Phase, data: st.DataObject) -> None:
    one, found = graph(name, phase)
    most = 2 * BLOCK["decode"] - 1 - one.next_n if phase == "decode" else one.packed_tokens
    lengths = data.draw(st.lists(st.integers(phase == "prefill", most), min_size=one.batch, max_size=one.batch))
    requests = replace(one, seed=data.draw(st.integers(0, 1000))).new_requests()  # other blocks in another order
    serving.fill(requests.cache, 1)
    step = serving.run(one, {phase: found}, phase, call(one, phase, requests, lengths))
    assert [changed for _, _, changed in step.writes.values()] == [0] * len(step.writes)
    assert all(torch.isfinite(rows).all() for rows in step.results.values())


def test_shapes_of_all_models_cover_each_batch_and_number_of_drafts() -> None:
    assert all([batch for batch, _ in shapes] == [1, 3, 8] for shapes in SHAPES.values())
    assert {next_n for shapes in SHAPES.values() for _, next_n in shapes} == {0, 1, 2, 3}


def spoiled(one: ServingCase, spoil: Any) -> list[str]:
    """The failures of an eager step whose cache ``spoil`` has changed afterwards."""
    requests = one.new_requests()
    serving.fill(requests.cache)

    def step(*args: Any) -> Any:
        out = one.model.decode(*args)  # type: ignore[operator]
        spoil(args[-1].layers[1], args[3])
        return out

    done = serving.run(one, {"decode": step}, "decode", call(one, "decode", requests, [5, 127, 0]))
    return serving.check(one, [done])[0].failures


def test_what_is_wrong_in_a_cache_is_noticed() -> None:
    one = case("qwen2.5", 3, 1, "decode")
    assert spoiled(one, lambda layer, slots: None) == []
    outside = spoiled(one, lambda layer, slots: layer.value[0, 5].add_(1))
    assert outside == ["decode: 1 of 2292 rows of the cache (value) outside of the step's slots have changed"]
    inside = spoiled(one, lambda layer, slots: layer.key.flatten(0, 1).index_fill_(0, slots[-1:], 0))
    assert [failure.partition(" error")[0] for failure in inside] == ["decode cache key: largest"]
