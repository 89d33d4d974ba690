"""Ways to write and to call a method that must compile like the plain one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cannopy
from cannopy.backend.guards import GuardError
from cannopy.backend.torchair import CompileError
from cannopy.frontend.errors import CaptureError


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


class Turns(nn.Module):
    def forward(self, angle: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(angle)


def test_an_operation_that_torchair_lacks_is_named_with_the_line_that_uses_it(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"^torchair has no converter for aten\.special_bessel_j0\.default, "
                                           r".*call_forms\.py:\d+; write that line with other operations$"):
        cannopy.compile(Turns(), example_inputs=(torch.rand(2, 4),), options=cannopy.Options(cache_dir=tmp_path))


class Installs(nn.Module):
    """Prepares itself under a lock at the first call, as transformers does for output_hidden_states."""

    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with self.lock:
                self.ready = True
        return x * 2


def test_hooks_that_the_first_call_installs(tmp_path: Path) -> None:
    model, x, options = Installs(), torch.rand(4), cannopy.Options(cache_dir=tmp_path)
    with pytest.raises(CaptureError, match=r"takes a lock\n  at .*with self\.lock:\n  cure: make one eager call"):
        cannopy.compile(model, example_inputs=(x,), options=options)
    model(x)
    assert torch.equal(cannopy.compile(model, example_inputs=(x,), options=options)(x), x * 2)


class Caching(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        from transformers import DynamicCache

        return x * 2, DynamicCache()


def test_a_cache_that_the_model_makes_is_refused_with_the_argument_to_pass(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"makes a DynamicCache and returns it\n  cure: pass a StaticCache"):
        cannopy.compile(Caching(), example_inputs=(torch.rand(4),), options=cannopy.Options(cache_dir=tmp_path))
