"""Pieces that no rule has: the model compiles and is right all the same, and a miss names what stands in the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import cannopy
from cannopy.frontend.serving import ServingCase
from cannopy.models.serving import ServingModel
from tests.e2e.unsupported import PIECES, SIZES

LAYERS = SIZES["num_hidden_layers"]


def step(model: ServingModel) -> tuple[Any, ...]:
    """A decode step of two requests with two tokens each, their caches filled."""
    args, _ = ServingCase(model, 2, 20, 128, next_n=1).filled("decode")
    return tuple(args)


def result(method: Any, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the keys of the last layer in float64, of a call on copies of ``args`` with caches in ``dtype``."""
    *inputs, cache = copy.deepcopy(args)
    for layer in cache.layers:
        for name in ("key", "value"):
            object.__setattr__(layer, name, getattr(layer, name).to(dtype))
    out = method(*inputs, cache)[0].double()
    return out, cache.layers[-1].key.double()


def wide(model: ServingModel) -> ServingModel:
    """The model in float64, complex buffers in complex128."""
    made = copy.deepcopy(model)
    for module in made.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_complex():
                module.register_buffer(name, buffer.to(torch.complex128), persistent=False)
    for value in (*made.parameters(), *made.buffers()):
        if value.is_floating_point():
            value.data = value.data.double()
    return made


@pytest.mark.parametrize("name", PIECES)
def test_is_right_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = PIECES[name]
    model = piece.make(monkeypatch)
    args = step(model)
    compiled = cannopy.compile(model, "decode", copy.deepcopy(args), options=cannopy.Options(
        phase="decode", cache_dir=tmp_path))
    misses = compiled.report.misses
    if piece.refused is None:
        assert misses == []
    else:
        rule, part = piece.refused
        said = [m for m in misses if m["rule"] == rule]
        assert said, [(m["rule"], m["reason"]) for m in misses]
        assert any(part in m["reason"] and m["remedy"] and ".py:" in m["source"] for m in said), said
    for rule in piece.fused:
        assert compiled.report.fusions.get(rule, 0) >= LAYERS, (rule, compiled.report.fusions)
    assert compiled.report.cache_copies == 0
    exact = result(wide(model).decode, args, torch.float64)
    plain = result(model.decode, args, torch.bfloat16)
    fused = result(compiled, args, torch.bfloat16)
    for one, other, truth in zip(fused, plain, exact, strict=True):
        allowed = 1.5 * (other - truth).norm()
        assert (one - truth).norm() <= allowed
    assert (plain[0] - exact[0]).norm() < 0.05 * exact[0].norm(), "the float64 run is of the same model"
