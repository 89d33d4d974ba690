"""scatter_nd_update and its in-place twin against an element loop."""

from __future__ import annotations

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import ints, normal


def scattered(target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    out = target.clone()
    depth = indices.shape[-1]
    rows = updates.reshape(-1, *target.shape[depth:])
    for index, row in zip(indices.reshape(-1, depth).tolist(), rows, strict=True):
        out[tuple(index)] = row
    return out


CASES = [
    ((9, 4), [[7], [0], [3]], (3, 4)),
    ((4, 5, 6), [[3, 4], [0, 1]], (2, 6)),
    ((4, 5), [[3, 4], [0, 1]], (2,)),
    ((9, 4), [[[7], [0]], [[3], [1]]], (2, 2, 4)),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("shape", "indices", "updates"), CASES)
def test_scatter(shape: tuple[int, ...], indices: list[object], updates: tuple[int, ...], dtype: torch.dtype) -> None:
    target, index, new = normal(*shape), torch.tensor(indices, dtype=dtype), normal(*updates)
    before, expected = target.clone(), scattered(target, index, new)
    assert torch.equal(torch.ops.npu.npu_scatter_nd_update(target, index, new), expected)
    assert torch.equal(target, before)
    result = torch.ops.npu.npu_scatter_nd_update_(target, index, new)
    assert torch.equal(target, expected)
    assert result.data_ptr() == target.data_ptr()


def test_in_place_through_a_view_reaches_the_storage() -> None:
    cache = torch.zeros(2, 4, 1, 3, dtype=torch.bfloat16)
    torch.ops.npu.npu_scatter_nd_update_(cache.view(8, 3), ints(5).view(1, 1), torch.ones(1, 3, dtype=torch.bfloat16))
    assert cache[1, 1, 0].tolist() == [1, 1, 1]
    assert cache.sum() == 3


@pytest.mark.parametrize("bad", [-1, 9])
@pytest.mark.parametrize("name", ["npu_scatter_nd_update", "npu_scatter_nd_update_"])
def test_an_index_outside_is_refused_by_name(name: str, bad: int) -> None:
    target = torch.zeros(9, 4)
    with pytest.raises(ContractError, match=rf"{name}: argument 'indices'.*\[{bad}\] at position \[1\]"):
        getattr(torch.ops.npu, name)(target, torch.tensor([[2], [bad]]), torch.ones(2, 4))
    assert target.eq(0).all()


def test_no_rows() -> None:
    target = normal(9, 4)
    empty = torch.empty(0, 1, dtype=torch.int64)
    assert torch.equal(torch.ops.npu.npu_scatter_nd_update(target, empty, normal(0, 4)), target)
