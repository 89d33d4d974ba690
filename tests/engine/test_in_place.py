"""Who sees a write: caches updated in place, copies that remain, outputs that share memory with nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cannopy.backend.host import engine

npu = torch.ops.npu


def _update(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    npu.npu_scatter_nd_update_(cache, index, rows)
    return cache.sum(0)


def _update_and_return(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    npu.npu_scatter_nd_update_(cache, index, rows)
    return cache


def _update_view(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    new = npu.npu_scatter_nd_update(cache.view(-1, 4), index, rows)
    cache.copy_(new.view_as(cache))
    return new.sum(0)


def _read_old(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    old = cache.sum(0)
    npu.npu_scatter_nd_update_(cache, index, rows)
    return old + 1, cache.sum(0)


def _keep_old(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    old = cache.clone()
    npu.npu_scatter_nd_update_(cache, index, rows)
    return old, cache.sum(0)


def _twice(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    npu.npu_scatter_nd_update_(cache, index, rows)
    npu.npu_scatter_nd_update_(cache, index + 1, rows * 2)
    return cache.sum(0)


def _functional(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    return npu.npu_scatter_nd_update(cache, index, rows), cache.sum()


def _slice(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    cache[1:3] = rows
    return cache.sum()


def _add(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    cache.add_(1)
    return cache * 2


def _overwrite(cache: Tensor, index: Tensor, rows: Tensor) -> Any:
    cache.copy_(rows.sum().expand_as(cache))
    return rows + 1


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "update": (_update, 0),
    "update and return": (_update_and_return, 0),
    "update through a view": (_update_view, 0),
    "old value read": (_read_old, 1),
    "old value kept": (_keep_old, 1),
    "two updates": (_twice, 2),
    "functional": (_functional, 1),
    "slice": (_slice, 1),
    "add": (_add, 0),
    "overwrite": (_overwrite, 0),
}


def _inputs() -> list[Tensor]:
    # Small whole numbers: sums are exact in any order.
    return [torch.randint(-9, 9, (6, 4)).float(), torch.tensor([[3], [1]]), torch.randint(-9, 9, (2, 4)).float()]


@pytest.mark.parametrize("name", CASES)
def test_the_caller_sees_what_eager_does(name: str, compiled: Callable[..., Any]) -> None:
    fn, copies = CASES[name]
    torch.manual_seed(3)
    inputs = _inputs()
    eager_inputs, given = [t.clone() for t in inputs], [t.clone() for t in inputs]
    lowered = compiled(fn)
    for _ in range(2):  # the second run reads what the first one wrote
        want = fn(*eager_inputs)
        got = lowered(*given)
        for found, expected in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            assert torch.equal(found, expected)
        for a, b in zip(given, eager_inputs, strict=True):
            assert torch.equal(a, b)
    assert engine.recorded()[-1].summary().cache_copies == copies


def test_the_returned_cache_is_the_callers(compiled: Callable[..., Any]) -> None:
    cache, index, rows = _inputs()
    assert compiled(_update_and_return)(cache, index, rows).data_ptr() == cache.data_ptr()


def test_a_strided_cache_is_written_through(compiled: Callable[..., Any]) -> None:
    cache, index, rows = torch.zeros(4, 6).t(), torch.tensor([[3], [1]]), torch.ones(2, 4)
    compiled(_update)(cache, index, rows)
    assert cache.sum(1).tolist() == [0, 4, 0, 4, 0, 0]


def test_swapped_tensors(compiled: Callable[..., Any]) -> None:
    def swap(a: Tensor, b: Tensor) -> Tensor:
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return a + b

    a, b = torch.zeros(3), torch.ones(3)
    assert compiled(swap)(a, b).tolist() == [1, 1, 1]
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [0, 0, 0]


def test_outputs_share_memory_with_nothing(compiled: Callable[..., Any]) -> None:
    def outputs(x: Tensor, y: Tensor) -> Any:
        z = x + y
        return z, z.view(-1), z[0], y.t().contiguous(), torch.ones(2, 3)

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    before = y.clone()
    fn = compiled(outputs)
    results = fn(x, y)
    memory = {t.untyped_storage().data_ptr() for t in (*results, x, y)}
    assert len(memory) == len(results) + 2
    for t in results:
        t.fill_(9)
    assert torch.equal(y, before)
    again = fn(x, y)
    assert again[4].tolist() == torch.ones(2, 3).tolist()


def test_a_constant_is_not_written(compiled: Callable[..., Any]) -> None:
    def fresh(index: Tensor, rows: Tensor) -> Tensor:
        return npu.npu_scatter_nd_update(torch.zeros(4, 2), index, rows)

    fn = compiled(fresh)
    assert fn(torch.tensor([[1]]), torch.ones(1, 2)).sum().item() == 2
    assert fn(torch.tensor([[2]]), torch.ones(1, 2)).sum().item() == 2
