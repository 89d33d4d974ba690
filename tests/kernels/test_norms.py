"""rms_norm and add_rms_norm against the formula, row by row in float64."""

from __future__ import annotations

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import assert_close, normal, round_to

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rms_rows(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd) of float64 rows, one at a time."""
    y, rstd = torch.empty_like(x), torch.empty(x.shape[0], 1, dtype=torch.float64)
    for i, row in enumerate(x):
        rstd[i, 0] = 1 / (sum(float(v) ** 2 for v in row) / row.numel() + epsilon) ** 0.5
        y[i] = row * rstd[i, 0] * gamma
    return y, rstd


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_norm(dtype: torch.dtype, epsilon: float) -> None:
    x, gamma = normal(7, 33, scale=3, dtype=dtype), normal(33, dtype=dtype)
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, epsilon)
    exact, exact_rstd = rms_rows(x.double(), gamma.double(), epsilon)
    assert y.dtype == dtype
    assert rstd.dtype == torch.float32
    assert_close(y, exact, ulps=0.51 if dtype != torch.float32 else 4)
    assert_close(rstd, exact_rstd, ulps=4)


def test_rms_norm_over_two_axes_with_fp32_gamma() -> None:
    x, gamma = normal(5, 3, 8), normal(3, 8, dtype=torch.float32)
    y, rstd = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)
    exact, exact_rstd = rms_rows(x.double().flatten(1), gamma.double().flatten(), 1e-5)
    assert_close(y, exact.view(5, 3, 8))
    assert_close(rstd, exact_rstd.view(5, 1, 1), ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_normalises_the_rounded_sum(dtype: torch.dtype) -> None:
    x1, x2, gamma = normal(7, 33, scale=20, dtype=dtype), normal(7, 33, dtype=dtype), normal(33, dtype=dtype)
    y, rstd, x = torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    total = round_to(x1.double() + x2.double(), dtype)
    exact, exact_rstd = rms_rows(total, gamma.double(), 1e-6)
    assert torch.equal(x.double(), total)
    assert_close(y, exact, ulps=0.51 if dtype != torch.float32 else 4)
    assert_close(rstd, exact_rstd, ulps=4)


def test_mismatched_operands_are_refused_by_name() -> None:
    with pytest.raises(ContractError, match=r"npu_add_rms_norm: argument 'x2'.*x2-shape"):
        torch.ops.npu.npu_add_rms_norm(normal(7, 32), normal(6, 32), normal(32))
    with pytest.raises(ContractError, match=r"argument 'gamma'.*gamma-dtype"):
        torch.ops.npu.npu_add_rms_norm(normal(7, 32), normal(7, 32), normal(32, dtype=torch.float32))
