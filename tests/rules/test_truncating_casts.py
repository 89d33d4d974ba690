"""Casts to integers or floats of 8 bits change values: no rule looks through them. Zero is no scale of attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cannopy.fusion_rules import catalog, dialect
from tests.rules.moe_support import Tensor, trace

X = (torch.randn((1, 2, 16, 64), generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
GAMMA = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()


def norm(x: Tensor, gamma: Tensor, kind: torch.dtype) -> Tensor:
    """The Llama norm, whose normalised value is cast to ``kind`` first."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gamma * normed.to(kind).to(x.dtype)


def attention(x: Tensor, change: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor]) -> Tensor:
    """softmax(change(x xᵀ)) x"""
    scores = change((x @ x.transpose(-1, -2)).float())
    return weights(torch.softmax(scores, -1)).to(x.dtype) @ x


def same(t: Tensor) -> Tensor:
    return t


CHANGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm to integers": lambda x, g: norm(x, g, torch.int32),
    "scores to integers": lambda x, g: attention(x, lambda s: (s / 8).to(torch.int32).float(), same),
    "weights to integers": lambda x, g: attention(x, lambda s: s / 8, lambda w: (w * 4).to(torch.int32).float()),
    "norm to floats of 8 bits": lambda x, g: norm(x, g, torch.float8_e4m3fn),
    "scores to floats of 8 bits": lambda x, g: attention(x, lambda s: (s / 8).to(torch.float8_e5m2).float(), same),
    "weights to floats of 8 bits": lambda x, g: attention(
        x, lambda s: s / 16, lambda w: w.to(torch.float8_e4m3fn).float()),
    "scores times zero": lambda x, g: attention(x, lambda s: s * 0.0, same),
    "scores over zero": lambda x, g: attention(x, lambda s: s / 0.0, same),
}


@pytest.mark.parametrize("name", CHANGED)
def test_values_stay(name: str) -> None:
    dialect.register_all()
    before = trace(CHANGED[name], X, GAMMA, parameters=[1])
    wanted = before.run()
    after, log = before.fused(catalog.LIFT)
    assert "lift_attention" not in log.counts()
    for new, old in zip(after.run(), wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(("name", "form"), [
    ("lift_rms_norm", lambda x, g: norm(x, g, torch.bfloat16)),
    ("lift_attention", lambda x, g: attention(x, lambda s: s / 8, same)),
])
def test_the_same_without_the_change_is_lifted(name: str, form: Callable[[Tensor, Tensor], Tensor]) -> None:
    dialect.register_all()
    _, log = trace(form, X, GAMMA, parameters=[1]).fused(catalog.LIFT)
    assert log.counts().get(name) == 1
