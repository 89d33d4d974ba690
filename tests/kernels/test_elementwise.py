"""swiglu, the rotary forms and prefetch against scalar formulas."""

from __future__ import annotations

import math

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError, check_call
from tests.kernels.numerics import assert_close, normal

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tolerance(dtype: torch.dtype) -> float:
    return 0.51 if dtype != torch.float32 else 3.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dtype: torch.dtype, dim: int) -> None:
    x = normal(3, 10, 6, scale=4, dtype=dtype)
    y = torch.ops.npu.npu_swiglu(x, dim)
    moved = x.double().movedim(dim, -1)
    half = moved.shape[-1] // 2
    exact = torch.empty(*moved.shape[:-1], half, dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in exact.shape)).tolist():
        gate, up = float(moved[(*index[:-1], index[-1])]), float(moved[(*index[:-1], index[-1] + half)])
        exact[tuple(index)] = gate / (1 + math.exp(-gate)) * up
    assert_close(y, exact.movedim(-1, dim), ulps=tolerance(dtype))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, partner: list[int], sign: list[int]) -> torch.Tensor:
    """y[d] = x[d]·cos[d] + sign[d]·x[partner[d]]·sin[d], element by element in the last dimension."""
    x, cos, sin = torch.broadcast_tensors(x.double(), cos.double(), sin.double())
    y = torch.empty_like(x)
    for d in range(x.shape[-1]):
        y[..., d] = x[..., d] * cos[..., d] + sign[d] * x[..., partner[d]] * sin[..., d]
    return y


HALF = ([4, 5, 6, 7, 0, 1, 2, 3], [-1] * 4 + [1] * 4)


def slack(x: torch.Tensor) -> float:
    return float(x.double().abs().max()) * 2.0**-22


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "table"),
    [((1, 5, 3, 8), (1, 5, 1, 8)), ((5, 3, 1, 8), (5, 1, 1, 8)), ((2, 3, 5, 8), (1, 1, 5, 8)), ((5, 3, 8), (5, 1, 8))],
)
def test_rotary_mul_half(dtype: torch.dtype, shape: tuple[int, ...], table: tuple[int, ...]) -> None:
    x, angle = normal(*shape, dtype=dtype), torch.rand(*table, dtype=torch.float64) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    y = torch.ops.npu.npu_rotary_mul(x, cos, sin)
    assert_close(y, rotated(x, cos, sin, *HALF), ulps=0.51, slack=slack(x))


def test_rotary_mul_refuses_a_mode_that_the_converter_drops() -> None:
    x, table = normal(1, 5, 3, 8), normal(1, 5, 1, 8)
    with pytest.raises(ContractError, match=r"rotary_mode.*clause mode;.*drops rotary_mode"):
        torch.ops.npu.npu_rotary_mul(x, table, table, "interleave")


def test_interleave_rope_pairs_neighbours_and_leaves_halves() -> None:
    x, angle = normal(2, 3, 5, 64), torch.rand(2, 1, 5, 64, dtype=torch.float64) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    y = torch.ops.npu.npu_interleave_rope(x, cos, sin)
    exact = torch.empty(2, 3, 5, 64, dtype=torch.float64)
    for i in range(32):
        even, odd = x[..., 2 * i].double(), x[..., 2 * i + 1].double()
        exact[..., i] = even * cos[..., i].double() - odd * sin[..., i].double()
        exact[..., 32 + i] = odd * cos[..., 32 + i].double() + even * sin[..., 32 + i].double()
    assert_close(y, exact, slack=slack(x))


def test_prefetch_changes_nothing_and_wants_a_dependency_in_a_graph() -> None:
    x = normal(4, 4)
    before = x.clone()
    assert torch.ops.npu.npu_prefetch(x, x, 64) is None
    assert torch.ops.npu.npu_prefetch(x, None, 64) is None
    assert torch.equal(x, before)
    [broken] = check_call("npu_prefetch", (x, None, 64), {}, product="atlas-a3")
    assert broken.clause == "dependency-in-graph"
    assert not check_call("npu_prefetch", (x, x, 64), {}, product="atlas-a3")
