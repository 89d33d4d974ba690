"""`cannopy run` where each rank has heads of its own in caches: the judge knows them, all forms and phases run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy.cli import main
from cannopy.frontend.serving import CachePart, ServingCase
from cannopy.models import zoo
from cannopy.parity import serving
from tests.parallel.test_cli import ranks_of


def case() -> ServingCase:
    preset = zoo.preset("qwen2.5", "tiny")
    model = zoo.build_serving(replace(preset, config={**preset.config, "num_hidden_layers": 1}))
    return ServingCase(model, 2, 20, 64, 0, 1, 32)


def judged(whole: ServingCase, head: int) -> Any:
    """A rank that is to have head 1 of two and has ``head``."""
    own = replace(whole, part=CachePart(groups=4, group=2))
    known = whole.new_requests().cache
    requests = own.new_requests()
    for layer in requests.cache.layers:
        for name in ("key", "value"):
            object.__setattr__(layer, name, getattr(layer, name)[:, :, :1].contiguous())

    def call(phase: str, *args: Any) -> Any:
        *inputs, cache = args
        out = getattr(whole.model, phase)(*inputs, known)
        for (_, full), (_, mine) in zip(serving.tensors(known), serving.tensors(cache), strict=True):
            slots = inputs[-1]
            mine.flatten(0, 1)[slots] = full.flatten(0, 1)[slots][:, head : head + 1]
        return out

    forward: Any = {phase: lambda *args, p=phase: call(p, *args) for phase in ("prefill", "decode")}
    return serving.check(own, serving.generate(own, forward, requests, 2))[0]


def test_the_judge_knows_the_heads_of_a_rank() -> None:
    whole = case()
    assert whole.cache_heads == 2
    assert not judged(whole, 1).failures
    assert any("cache key" in sentence for sentence in judged(whole, 0).failures)
    rows = torch.arange(24).view(2, 4, 3)
    for parts, expected in ((2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]]), (8, [[i // 2] for i in range(8)])):
        found = [CachePart(groups=parts, group=i).heads(rows)[0, :, 0] // 3 for i in range(parts)]
        assert [heads.tolist() for heads in found] == expected


@pytest.mark.usefixtures("activated")
def test_one_die_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compile", "qwen3-moe", "--form", "serving", "--offline", "--no-cache", "--json", "--parallel",
             "attn_tp=4,ep=4", "--rank", "3"]
    assert main(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ge_ops"]["HcomAllReduce"] == 3
    assert report["cache_copies"] == 0
    assert report["memory"]["caches"] == 3 * 2 * 5 * 128 * 128 * 2


@pytest.mark.slow
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("asked", [
    ["qwen3-moe", "--form", "serving", "--parallel", "attn_tp=2,ep=2", "--next-n", "1"],
    ["qwen2.5", "--parallel", "attn_tp=2,dense_tp=2", "--phase", "decode"],
    ["qwen2.5", "--parallel", "attn_tp=2,dense_tp=2", "--phase", "prefill"],
], ids=["serving", "stock decode", "stock prefill"])
def test_ranks_run_together(asked: list[str], tmp_path: Path) -> None:
    asked = ["run", *asked, "--batch", "2", "--steps", "2", "--prompt-tokens", "30", "--no-cache", "--group-timeout",
             "200", "--json"]
    (code, out, error), (other, silence, _) = ranks_of(2, asked, tmp_path)
    assert (code, other, silence) == (0, 0, ""), error
    report = json.loads(out)
    assert [rank["passed"] for rank in report["ranks"]] == [True, True]
