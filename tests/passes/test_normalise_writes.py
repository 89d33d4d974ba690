"""Writes of positions into a mutated input reach index_copy; other writes stay what they are."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import aten
from tests.passes.graphs import built, count, run, same

CACHE = torch.randn(2, 3, 8, 4)
ROWS = torch.randn(2, 3, 2, 4)


def put(index, value, cache=CACHE, **kwargs):
    inputs = [cache, index, value]
    program = built(
        lambda c, x, i, v: (c(aten.index_put.default, x, [None, None, i], v, **kwargs),) * 2, *inputs, mutated=[0]
    )
    before = run(program, *inputs)
    normalise.run(program)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    return program


@pytest.mark.parametrize("index", [[1, 6], [-1, 2], [-8, -7]])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_positions(index, kind):
    program = put(torch.tensor(index, dtype=kind), ROWS)
    assert count(program, aten.index_copy.default) == 1
    assert count(program, aten.index_put.default) == 0


def test_one_position_without_its_dim():
    assert count(put(torch.tensor(-3), torch.randn(2, 3, 4)), aten.index_copy.default) == 1


def test_broadcast_value():
    assert count(put(torch.tensor([0, 5]), torch.randn(3, 1, 4)), aten.index_copy.default) == 1


def test_known_positions_need_no_wrapping():
    program = built(
        lambda c, x, v: (c(aten.index_put.default, x, [None, None, c(aten.arange.default, 2)], v),) * 2, CACHE, ROWS,
        mutated=[0],
    )
    normalise.run(program)
    assert count(program, aten.where.self) == 0
    assert count(program, aten.index_copy.default) == 1


def test_mask_is_no_position():
    mask = torch.tensor([True, False] * 4)
    assert count(put(mask, torch.tensor(2.0)), aten.index_copy.default) == 0


def test_accumulating_stays():
    assert count(put(torch.tensor([1, 1]), ROWS, accumulate=True), aten.index_put.default) == 1


@pytest.mark.parametrize(("start", "end", "step"), [(2, 4, 1), (-2, None, 1), (1, 5, 2)])
def test_static_range(start, end, step):
    inputs = [CACHE, ROWS]
    program = built(
        lambda c, x, v: (c(aten.slice_scatter.default, x, v, 2, start, end, step),) * 2, *inputs, mutated=[0]
    )
    before = run(program, *inputs)
    normalise.run(program)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    assert count(program, aten.index_copy.default) == 1


def test_slice_scatter_of_a_temporary_stays():
    program = built(lambda c, x, v: c(aten.slice_scatter.default, x, v, 2, 1, 3), CACHE, ROWS)
    normalise.run(program)
    assert count(program, aten.slice_scatter.default) == 1
