"""A compiled model of copied layers: results, weights and cache entries are those of all layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import cannopy
from tests.regions.support import Stack, stack_call

COPIED = 4


def _compile(model: Any, args: Any, folder: Path, **options: Any) -> Any:
    return cannopy.compile(model, example_inputs=args, options=cannopy.Options(cache_dir=folder, **options))


def _same(compiled: Any, model: Any, args: Any) -> None:
    """The compiled call gives what eager gives, and leaves the same in caches and buffers."""
    twin, expected, actual = copy.deepcopy(model), copy.deepcopy(args), copy.deepcopy(args)
    with torch.no_grad():
        wanted = twin(*expected)
        got = compiled(*actual)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    buffers = dict(model.named_buffers())
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=1e-5, atol=1e-5)


def test_compiled_copies(tmp_path: Path) -> None:
    model, args = Stack(7), stack_call(7)
    compiled = _compile(model, args, tmp_path)
    report = compiled.report
    assert report.regions == {"layers": 7, "captured": 4, "reason": ""}
    assert [row["layer"] for row in report.layers] == [0, 1, 2, 3, 4, 5, 6, None]
    assert report.layers[1]["kernels"] == report.layers[COPIED]["kernels"]
    _same(compiled, model, args)
    with torch.no_grad():  # weights derived from those of a copied layer follow them
        model.layers[COPIED].gate.weight.mul_(3)
        model.layers[COPIED].down.weight = torch.nn.Parameter(-model.layers[COPIED].down.weight)
    _same(compiled, model, args)
    assert _compile(model, args, tmp_path).report.cache["status"] == "hit"
    model.layers[COPIED].mixer.scale = 0.125
    again = _compile(model, args, tmp_path)
    assert again.report.cache["status"] == "miss"
    assert f"layers.{COPIED}" in again.report.cache["reason"]
    assert again.report.regions["captured"] == 7
    assert "no run" in again.report.regions["reason"]
    _same(again, model, args)
