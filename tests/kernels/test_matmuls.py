"""transpose_batchmatmul and grouped_matmul against float64 sums."""

from __future__ import annotations

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import assert_close, ints, normal


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a @ b, what an fp32 accumulation may be off) for 2-D a and b."""
    exact = torch.einsum("mk,kn->mn", a.double(), b.double())
    return exact, torch.einsum("mk,kn->mn", a.double().abs(), b.double().abs()) * (a.shape[1] * 2.0**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("perm", [[1, 0, 2], [0, 1, 2], None])
def test_transpose_batchmatmul(dtype: torch.dtype, perm: list[int] | None) -> None:
    x = normal(5, 3, 32, dtype=dtype)  # [M, B, K]
    weight = normal(3, 32, 16, dtype=dtype)
    passed = x if perm == [1, 0, 2] else x.transpose(0, 1)
    y = torch.ops.npu.npu_transpose_batchmatmul(passed, weight, perm_x1=perm, perm_y=[1, 0, 2])
    assert y.shape == (5, 3, 16)
    assert y.is_contiguous()
    for b in range(3):
        exact, slack = product(x[:, b], weight[b])
        assert_close(y[:, b], exact, slack=slack)


def expected_groups(
    x: torch.Tensor, weights: list[torch.Tensor], sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.zeros(x.shape[0], weights[0].shape[1], dtype=torch.float64)
    slack = torch.zeros_like(exact)
    start = 0
    for weight, size in zip(weights, sizes, strict=True):
        exact[start : start + size], slack[start : start + size] = product(x[start : start + size], weight)
        start += size
    return exact, slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [[2, 0, 5, 3], [0, 0, 0, 10], [0, 0, 0, 0], [1, 2, 3, 1]])
@pytest.mark.parametrize("kind", [0, 1])
def test_grouped_matmul(dtype: torch.dtype, sizes: list[int], kind: int) -> None:
    x, weight = normal(10, 24, dtype=dtype), normal(4, 24, 8, dtype=dtype)
    groups = torch.tensor(sizes, dtype=torch.int64)
    listed = groups if kind == 1 else groups.cumsum(0)
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=listed, group_type=0, group_list_type=kind, split_item=3
    )
    exact, slack = expected_groups(x, list(weight), sizes)
    assert_close(y, exact, slack=slack)
    assert y[sum(sizes) :].eq(0).all()


def test_grouped_matmul_with_bias_and_transposed_weight() -> None:
    x, weight = normal(6, 24), normal(3, 8, 24).transpose(1, 2)
    bias = normal(3, 8, dtype=torch.float32)
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        [weight],
        bias=[bias],
        group_list=ints(1, 3, 2, dtype=torch.int64),
        group_type=0,
        group_list_type=1,
        split_item=2,
    )
    exact, slack = expected_groups(x, list(weight), [1, 3, 2])
    owner = [0, 1, 1, 1, 2, 2]
    assert_close(y, exact + bias.double()[owner], slack=slack + 1e-6)


def test_grouped_matmul_list_forms() -> None:
    x, weights = normal(6, 24), [normal(24, 8) for _ in range(3)]
    exact, slack = expected_groups(x, weights, [1, 3, 2])
    options = {"group_type": 0, "group_list_type": 1, "split_item": 3}
    (many_weights,) = torch.ops.npu.npu_grouped_matmul(
        [x], weights, group_list=ints(1, 3, 2, dtype=torch.int64), **options
    )
    (many_x,) = torch.ops.npu.npu_grouped_matmul(list(x.split([1, 3, 2])), weights, **options)
    assert_close(many_weights, exact, slack=slack)
    assert torch.equal(many_weights, many_x)
    wide = [normal(2, 3, 24), normal(4, 5, 24)]
    outs = torch.ops.npu.npu_grouped_matmul(wide, weights[:2], group_type=-1, split_item=0)
    for out, x_g, weight in zip(outs, wide, weights, strict=False):
        exact, slack = product(x_g.flatten(0, 1), weight)
        assert_close(out.flatten(0, 1), exact, slack=slack)


@pytest.mark.parametrize(
    ("values", "kind"), [([2, -1, 5], 1), ([4, 4, 4], 1), ([3, 2, 6], 0), ([1, 2, 11], 0), ([-1, 2, 3], 0)]
)
def test_group_lists_that_are_none_are_refused(values: list[int], kind: int) -> None:
    with pytest.raises(ContractError, match=r"argument 'group_list'.*clause group-list;"):
        torch.ops.npu.npu_grouped_matmul(
            [normal(10, 24)],
            [normal(3, 24, 8)],
            group_list=torch.tensor(values),
            group_type=0,
            group_list_type=kind,
            split_item=3,
        )


def test_quantised_forms_are_refused() -> None:
    with pytest.raises(ContractError, match="host-x-dtype"):
        torch.ops.npu.npu_grouped_matmul(
            [torch.zeros(4, 32, dtype=torch.int8)],
            [torch.zeros(2, 32, 8, dtype=torch.int8)],
            group_list=ints(2, 4, dtype=torch.int64),
            group_type=0,
            split_item=3,
        )
