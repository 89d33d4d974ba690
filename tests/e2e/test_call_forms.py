"""Ways to write and to call a method that must compile like the plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cannopy
from cannopy.backend.guards import GuardError


def renaming(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like transformers' deprecate_kwarg: self is among *args."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "old_scale" in kwargs:
            kwargs["scale"] = kwargs.pop("old_scale")
        return method(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(2, 8))

    @renaming
    def forward(self, x: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        result: torch.Tensor = self.linear(self.total) * scale - bias
        return result


def test_decorator_that_hides_self(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decorated().eval()
    x, bias, scale = torch.randn(2, 8), torch.randn(8), torch.rand(8)
    with torch.no_grad():
        expected = model.linear(x) * scale - bias
    compiled = cannopy.compile(model, example_inputs=(x, bias), example_kwargs={"old_scale": scale},
                               options=cannopy.Options(cache_dir=tmp_path))
    found = compiled(x, bias, old_scale=scale)
    torch.testing.assert_close(found, expected)
    assert torch.equal(model.total, x)


class Remembers(nn.Module):
    """Adds the sum of all tokens so far, which a transformers cache holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        token = self.linear(x)[:, None]
        keys, _ = cache.update(token, token, 0)
        result: torch.Tensor = x + keys[:, 0].sum(1, keepdim=True)
        return result


def test_a_new_static_cache_for_each_prompt(tmp_path: Path) -> None:
    from transformers import LlamaConfig, StaticCache

    def new() -> Any:
        return StaticCache(config=LlamaConfig(num_hidden_layers=1), max_cache_len=16)

    torch.manual_seed(0)
    model = Remembers().eval()
    x = torch.randn(2, 1, 8)
    compiled = cannopy.compile(model, example_inputs=(x,), example_kwargs={"cache": new()},
                               options=cannopy.Options(cache_dir=tmp_path))
    for _ in range(2):
        ours, eager = new(), new()
        for step in range(3):
            with torch.no_grad():
                expected = model(x * step, eager)
            torch.testing.assert_close(compiled(x * step, cache=ours), expected)
        torch.testing.assert_close(ours.layers[0].keys, eager.layers[0].keys)
        assert int(ours.layers[0].cumulative_length) == 3
    with pytest.raises(GuardError, match=r"`x` .*\[2, 1, 8\].*\[2, 2, 8\]"):
        compiled(torch.randn(2, 2, 8), cache=new())
