"""What all models of the zoo are made of: RMSNorm, rotary embedding, gated MLP, attention, experts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps)`` in float32, rounded to the dtype of ``x``, times gamma."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[…, size]`` → ``[…, size]``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Angles by position. ``rope`` holds ``theta`` and, for YaRN, ``factor``, ``original_positions`` and the ramp."""

    inv_freq: Tensor

    def __init__(self, dim: int, rope: Mapping[str, Any]) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(dim, rope), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, ``[T, dim]`` each: the angles of all pairs, twice."""
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def inverse_frequencies(dim: int, rope: Mapping[str, Any]) -> Tensor:
    """Radians per position of each of the ``dim / 2`` pairs; with ``factor``, as YaRN scales them (arXiv 2309.00071).

    Pairs that turn more than ``beta_fast`` times over the original context keep their frequency, those that turn less
    than ``beta_slow`` times are slowed down by ``factor``, in between the two are mixed linearly.
    """
    theta = float(rope["theta"])
    plain: Tensor = theta ** (-torch.arange(0, dim, 2, dtype=torch.float) / dim)
    if "factor" not in rope:
        return plain

    def pair_with(turns: float) -> float:
        return dim * math.log(rope["original_positions"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_with(rope.get("beta_slow", 1))), dim - 1)
    slowed = ((torch.arange(dim // 2, dtype=torch.float) - low) / max(high - low, 1e-3)).clamp(0, 1)
    mixed: Tensor = plain / float(rope["factor"]) * slowed + plain * (1 - slowed)
    return mixed


def softmax_scale(head_dim: int, rope: Mapping[str, Any]) -> float:
    """``1/√head_dim``; YaRN with ``mscale_all_dim`` multiplies it by ``(0.1·mscale·ln factor + 1)²``."""
    mscale = rope.get("mscale_all_dim", 0.0)
    stretch = 0.1 * mscale * math.log(rope["factor"]) + 1.0 if mscale and rope.get("factor", 1.0) > 1 else 1.0
    return float(head_dim**-0.5 * stretch * stretch)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs ``(x[i], x[i + dim/2])``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs ``(x[2i], x[2i + 1])``; the result has all first members, then all second ones."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of ``query`` ``[groups, queries, heads, dim]``, the result in the same shape.

    ``key`` and ``value`` are ``[groups, keys, kv heads, dim]``, ``mask`` ``[groups, queries, keys]``.
    """
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask[:, None], scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) · up(x))``."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.Module):
    """Gated MLPs, ``gate_up_proj[e]`` being gate above up."""

    def __init__(self, experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' results.

        ``x`` ``[T, hidden]``, ``chosen`` expert numbers ``[T, k]`` (all different in a row), ``weights`` ``[T, k]``.
        """
        tokens, k = chosen.shape
        rows = x[:, None].expand(tokens, k, x.shape[1]).flatten(0, 1)[..., None]
        gate, up = torch.bmm(self.gate_up_proj[chosen.flatten()], rows)[..., 0].chunk(2, dim=-1)
        out = torch.bmm(self.down_proj[chosen.flatten()], (F.silu(gate) * up)[..., None])[..., 0]
        out = out.unflatten(0, (tokens, k)) * weights[..., None]
        y: Tensor = out.sum(1).to(x.dtype)
        return y

    def one_by_one(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The result of `forward`, expert by expert: it depends on the data, but takes no copy of weights per token."""
        out = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            out[rows, places] = F.linear(F.silu(gate) * up, self.down_proj[expert])
        y: Tensor = (out * weights[..., None]).sum(1).to(x.dtype)
        return y


@contextlib.contextmanager
def experts_one_by_one(model: nn.Module) -> Iterator[None]:
    """While active, `Experts` of ``model`` compute by `Experts.one_by_one`: eager runs of many tokens fit memory."""
    found = [m for m in model.modules() if isinstance(m, Experts)]
    for module in found:
        module.__dict__["forward"] = module.one_by_one
    try:
        yield
    finally:
        for module in found:
            del module.__dict__["forward"]
