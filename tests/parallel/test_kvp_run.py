"""Runs of dies that have a part of a cache: the judge knows their rows, block 0 is free, all others keep their bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cannopy.cli import main
from cannopy.frontend.serving import WHOLE, CachePart, ServingCase
from cannopy.models import zoo
from cannopy.parity import serving
from tests.parallel.test_cli import ranks_of

BLOCK, DIES = 32, 4
Change = Callable[[Tensor, Tensor, CachePart], None]


@cache
def whole() -> ServingCase:
    """Two prompts of 40 tokens or less in blocks of 32 rows, steps of two tokens."""
    preset = zoo.preset("deepseek-r1", "tiny")
    model = zoo.build_serving(replace(preset, config={**preset.config, "num_hidden_layers": 1}))
    return ServingCase(model, 2, 40, 64, 0, 1, BLOCK)


def of_die(rank: int) -> ServingCase:
    return replace(whole(), part=CachePart(DIES, rank))


def die(case: ServingCase, change: Change | None = None) -> dict[Any, Any]:
    """Calls of a die that knows the whole cache and keeps its rows of it; ``change``: of a cache by slots, at last."""
    known = replace(case, part=WHOLE).new_requests().cache

    def of(phase: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            *inputs, own = args
            out = getattr(case.model, phase)(*inputs, known)
            for (_, full), (_, mine) in zip(serving.tensors(known), serving.tensors(own), strict=True):
                slots = inputs[-1]
                here = case.part.has(slots)
                rows = mine.flatten(0, 1)
                rows[: BLOCK // DIES] = 7.0  # what other dies would have
                rows[case.part.rows(slots[here])] = full.flatten(0, 1)[slots[here]]
                if change is not None:
                    change(rows, slots, case.part)
            return out
        return call
    return {phase: of(phase) for phase in ("prefill", "decode")}


def judged(case: ServingCase, change: Change | None = None) -> Any:
    requests = case.new_requests()
    assert {t.shape[0] for _, t in serving.tensors(requests.cache)} == {2}  # of 2 · 2 + 3 blocks
    return serving.check(case, serving.generate(case, die(case, change), requests, 3))[0]


def test_rows_of_all_dies_are_those_of_the_whole_cache() -> None:
    of_one = serving.check(whole(), serving.generate(whole(), {}, whole().new_requests(), 3))[0]
    found = [judged(of_die(rank)) for rank in range(DIES)]
    for report in found:
        assert report.failures == []
        assert {p.phase for p in report.errors} == {p.phase for p in of_one.errors}
    for i, one in enumerate(of_one.errors):
        tokens = [report.errors[i].compiled.tokens for report in found]
        assert (sum(tokens) if "cache" in one.phase else tokens[0]) == one.compiled.tokens


def test_a_cache_has_two_blocks() -> None:
    """npu_kv_rmsnorm_rope_cache takes no fewer."""
    requests = replace(whole(), part=CachePart(16, 3)).new_requests()
    assert {t.shape[0] for _, t in serving.tensors(requests.cache)} == {2}


@pytest.mark.parametrize(("change", "words"), [
    (lambda rows, slots, part: rows[part.rows(slots[part.has(slots)])].zero_(), None),
    (lambda rows, slots, part: rows.__setitem__(part.rows(slots[part.has(slots)]), 0.0), "error"),
    (lambda rows, slots, part: rows[-1].add_(1.0), "rows of the cache (latent) outside of the step's slots have"),
    (lambda rows, slots, part: rows.__setitem__(part.rows(slots), 0.0), "outside of the step's slots have changed"),
], ids=["a copy", "no rows", "another row", "rows of others"])
def test_wrong_rows_are_found(change: Change, words: str | None) -> None:
    failures = judged(of_die(1), change).failures
    assert any(words in sentence for sentence in failures) if words else not failures


def test_a_phase_that_is_not_compiled() -> None:
    """The prompts of a run of decode alone: by the eager model, of which the die keeps its rows."""
    case, full = of_die(2), whole().new_requests()
    serving.generate(whole(), {}, full, 0)
    own = case.new_requests()
    (step,) = serving.generate(case, {}, own, 0)
    slots = step.slots[case.part.has(step.slots) & (step.slots >= BLOCK)]
    assert len(slots)
    for (_, a), (_, b) in zip(serving.tensors(full.cache), serving.tensors(own.cache), strict=True):
        assert torch.equal(a.flatten(0, 1)[slots], b.flatten(0, 1)[case.part.rows(slots)])


@pytest.mark.usefixtures("activated")
def test_one_die_is_compiled_with_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 9 blocks (two for each request, two that none has, block 0) a die of two has room for 5, in each layer."""
    asked = ["compile", "deepseek-r1", "--form", "serving", "--batch", "3", "--offline", "--no-cache", "--json",
             "--parallel", "kvp=2", "--rank", "1"]
    assert main(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ge_ops"]["AttentionUpdate"] == 4
    assert report["memory"]["caches"] == 4 * 5 * 128 * (512 + 64) * 2


@pytest.mark.slow
@pytest.mark.usefixtures("activated")
def test_ranks_run_together(tmp_path: Path) -> None:
    asked = ["run", "deepseek-r1", "--form", "serving", "--batch", "2", "--next-n", "1", "--steps", "2", "--no-cache",
             "--parallel", "kvp=2", "--group-timeout", "200", "--json"]
    (code, out, _), (other, silence, _) = ranks_of(2, asked, tmp_path)
    assert (code, other, silence) == (0, 0, "")
    report = json.loads(out)
    assert [rank["passed"] for rank in report["ranks"]] == [True, True]
    assert report["phases"]["decode"]["ge_ops"]["AttentionUpdate"] == 4
