"""Ways to write and to call a method that must compile like the plain one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cannopy


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
