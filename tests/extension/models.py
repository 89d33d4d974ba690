"""A small model with a cache, three gated layers and an output norm, and rule files for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, MIDDLE, ROWS = 32, 16, 24
Tensor = torch.Tensor


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate, self.up = (nn.Linear(WIDTH, MIDDLE, bias=False) for _ in range(2))
        self.down = nn.Linear(MIDDLE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """``forward(x [rows, width], cache [slots, width], slots [rows])`` writes x into the cache and reads it back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = Norm()

    def forward(self, x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        cache.index_copy_(0, slots, x)
        x = x + cache.mean(0)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def make(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Model, str, tuple[Tensor, ...]]:
    """A factory as the command line takes it."""
    torch.manual_seed(seed)
    model = Model().to(dtype).eval()
    x = torch.randn(ROWS, WIDTH).to(dtype)
    return model, "forward", (x, torch.zeros(2 * ROWS, WIDTH, dtype=dtype), torch.arange(ROWS) + 3)


WRONG = """\
import cannopy
from cannopy.rules import Any, Refusal, aten, op


def only_there(match, context):
    layer = match.anchor.meta.get("layer")
    return None if layer == {layer} else Refusal(f"this is layer {{layer}}", match.anchor)


@cannopy.rule(
    equation="down(x)  →  something else",
    pattern=op(aten.linear.default, op(aten.mul.Tensor, Any("a"), Any("b"), name="x"), Any("weight"), rest=True),
    check=only_there,
    before="swiglu",
)
def wrong_down(match, context):
    call = context.editor.call
    context.editor.replace(match.anchor, {value})
"""
VALUES = {
    "value": 'call(aten.linear.default, call(aten.mul.Tensor, match["x"], 1.25), match["weight"])',
    "raises": 'call(aten.linear.default, match["y"], match["weight"])',
    "shape": 'call(aten.slice.Tensor, match["weight"], 0, 0, 1)',
}


def wrong_rule(folder: Path, layer: int, value: str = "value") -> Path:
    """A file with a rule that spoils one layer: another ``value``, an error (``raises``) or another ``shape``."""
    path = folder / "wrong_rules.py"
    path.write_text(WRONG.format(layer=layer, value=VALUES[value]), encoding="utf-8")
    return path


def call_of(made: tuple[Any, ...]) -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    """(model, method, args, kwargs) of what a factory returned."""
    model, method, inputs = made
    return model, method, tuple(inputs), {}
