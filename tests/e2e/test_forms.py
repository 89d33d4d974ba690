"""Forms of model and call that users have: each is right on the host engine, fused or refused with its reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cannopy
from cannopy.parity import call as parity
from tests.rules.support import build, inputs

pytestmark = pytest.mark.slow

SPARSE, PROLOG = "sparse_flash_attention", "mla_prolog"


def _compile(model: torch.nn.Module, cache_dir: Path, tokens: int, batch: int = 1, past: int = 0,
             length: int = 256) -> tuple[cannopy.Compiled, tuple, dict]:
    args, kwargs = inputs(model, tokens, batch, past, length)
    compiled = cannopy.compile(model, "forward", args, kwargs, cannopy.Options(cache_dir=cache_dir))
    return compiled, args, kwargs


def _non_contiguous(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and ("proj" in name or "wq_b" in name):
            parameter.data = parameter.data.t().contiguous().t()


def _strided_and_training(model: torch.nn.Module) -> None:
    _non_contiguous(model)
    model.train()


FORMS: dict[str, tuple[dict, dict, Callable[[torch.nn.Module], None] | None, bool]] = {
    "batch-8": ({}, {"tokens": 1, "batch": 8, "past": 20}, None, True),
    "block-edge": ({}, {"tokens": 1, "past": 127}, None, True),
    "over-the-edge": ({}, {"tokens": 2, "past": 127}, None, True),
    "length-112": ({}, {"tokens": 3, "past": 20, "length": 112}, None, True),
    "length-100": ({}, {"tokens": 3, "past": 20, "length": 100}, None, False),
    "fp32": ({"dtype": torch.float32}, {"tokens": 3, "past": 20}, None, False),
    "tied-non-contiguous-train-mode": (
        {"tie_word_embeddings": True}, {"tokens": 3, "past": 20}, _strided_and_training, True),
    "odd-hidden": ({"hidden_size": 896}, {"tokens": 3, "past": 20}, None, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_form_is_right_and_fused_or_refused_with_a_reason(form: str, tmp_path: Path) -> None:
    sizes, call, change, fuses = FORMS[form]
    model = build(**sizes)
    if change:
        change(model)
    compiled, args, kwargs = _compile(model, tmp_path, **call)
    report, _, _ = parity.check(model, "forward", compiled, args, kwargs, "decode")
    assert report.passed, report.to_dict()
    fused = compiled.report.fusions
    assert (bool(fused.get(SPARSE)) and bool(fused.get(PROLOG))) is fuses
    assert fuses or any(m["rule"] in (SPARSE, PROLOG) and m["reason"] for m in compiled.report.misses)
    assert compiled.report.cache_copies == 0


def test_two_models_and_two_caches_in_one_process(tmp_path: Path) -> None:
    first, second = build(seed=0), build(seed=5, num_attention_heads=4, num_key_value_heads=4, index_topk=8)
    compiled = {m: _compile(m, tmp_path, tokens=1, past=30) for m in (first, second)}
    for model in (first, second, first):
        run, args, kwargs = compiled[model]
        report, _, _ = parity.check(model, "forward", run, args, kwargs, "decode")
        assert report.passed, report.to_dict()
    run = compiled[first][0]
    args, kwargs = inputs(first, 1, past=17, length=256, seed=9)
    report, _, _ = parity.check(first, "forward", run, args, kwargs, "decode")
    assert report.passed, "another cache, as it is after another prompt"
