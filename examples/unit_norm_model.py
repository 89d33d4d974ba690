"""A small model whose norms are written with F.normalize: ``cannopy run examples/unit_norm_model.py:make``."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64


class UnitNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.gamma


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = UnitNorm()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, str, tuple[torch.Tensor]]:
    torch.manual_seed(seed)
    return Model().to(dtype).eval(), "forward", (torch.randn(32, WIDTH).to(dtype),)
