"""Comparison in units in the last place, and random operands."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring numbers of `dtype` at each |exact| (float64)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def assert_close(
    actual: torch.Tensor, exact: torch.Tensor, ulps: float = 0.51, slack: torch.Tensor | float = 0.0
) -> None:
    """|actual - exact| ≤ ulps of actual's dtype, plus `slack` (float64, absolute, for fp32 sums that cancel).

    `exact` is float64 and unrounded: 0.51 allows one correct rounding and fp32's error before it.
    """
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape
    excess = (actual.double() - exact).abs() - ulps * ulp(exact, actual.dtype) - slack
    assert not actual.isnan().any()
    worst = float(excess.max()) if excess.numel() else 0.0
    assert worst <= 0, f"off by {worst} more than {ulps} ulp"


def round_to(x: torch.Tensor, dtype: torch.dtype = BF16) -> torch.Tensor:
    """float64 → `dtype` → float64: a documented rounding point."""
    return x.to(dtype).double()
