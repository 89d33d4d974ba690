"""The comparison itself: what it takes and what it does not."""

from __future__ import annotations

import pytest
import torch

from cannopy.parity.picks import Choice
from tests.mutation import oracle

Tensor = torch.Tensor
ROWS, WIDTH = 3, 512


def _normals(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _pair(values: Tensor, weights: Tensor, seed: int, shared: bool) -> oracle.Pair:
    """(in bf16, in float64) of ``values`` [rows, 1 or WIDTH] with an error of 0.4 % times ``weights`` [WIDTH].

    ``shared``: all entries of a row are the same number, so that its error is one factor.
    """
    count = 1 if shared else WIDTH
    error = 1 + 0.004 * _normals(ROWS, count, seed=seed)
    exact = (values[:, :count] * weights).expand(ROWS, WIDTH)
    return oracle.Results([(exact * error).bfloat16()]), oracle.Results([exact.contiguous()])


def _judged(shared: bool, seed: int, scale: float) -> tuple[list[str], list[str]]:
    """What is wrong with a result of another rounding times ``scale``: (by one run, by nine)."""
    values, weights = 2 + _normals(ROWS, WIDTH, seed=1).abs(), _normals(WIDTH, seed=2)
    pairs = [_pair(values * (1 + 0.01 * i), weights, 10 + i, shared) for i in range(9)]
    ours = oracle.Results([(_pair(values, weights, seed, shared)[0].tensors[0].double() * scale).bfloat16()])
    return oracle.wrong(ours, *pairs[0]), oracle.wrong(ours, *pairs[0], pairs[1:])


def test_rows_that_are_one_number_each_are_judged_by_more_runs() -> None:
    results = [_judged(True, seed, 1.0) for seed in range(100, 150)]
    assert any(alone for alone, _ in results)
    assert not any(together for _, together in results)


@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize(("shared", "scale"), [(True, 1.02), (True, 0.98), (False, 1.01), (False, 0.99)])
def test_a_wrong_scale_is_wrong_by_any_number_of_runs(shared: bool, scale: float, seed: int) -> None:
    assert all(_judged(shared, seed, scale))


@pytest.mark.parametrize("shape", [(64, 512), (2, 4, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_outlier_in_an_otherwise_perfect_tensor_is_wrong(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    exact = _normals(*shape, seed=4)
    as_is = (exact * (1 + torch.finfo(dtype).eps / 4 * _normals(*shape, seed=5))).to(dtype)
    ours = exact.to(dtype)
    assert oracle.wrong(oracle.Results([ours]), oracle.Results([as_is]), oracle.Results([exact])) == []
    ours.view(-1)[777] = 40.0
    assert oracle.wrong(oracle.Results([ours]), oracle.Results([as_is]), oracle.Results([exact]))


def test_one_element_of_another_kind_is_wrong() -> None:
    exact = _normals(ROWS, WIDTH, seed=6)
    for value in (float("inf"), float("nan"), 0.0):
        ours = exact.bfloat16()
        ours[1, 7] = value
        assert oracle.wrong(oracle.Results([ours]), oracle.Results([exact.bfloat16()]), oracle.Results([exact]))


def test_moved_values_are_one_rounding_off() -> None:
    value = _normals(1000, seed=3).bfloat16()
    moved = oracle.moved({"x": value, "ids": torch.arange(4)}, 0)
    steps = ((moved["x"].double() - value.double()) / value.double()).abs()
    assert 0.3 < float((steps > 0).double().mean()) < 0.9
    assert float(steps.max()) <= 2 * torch.finfo(torch.bfloat16).eps
    assert torch.equal(moved["ids"], torch.arange(4))


def test_a_rounded_number_may_be_any_that_one_rounding_gives() -> None:
    """(The eager result is 3 everywhere, and 4 at one place for other values.)"""
    threes = torch.full((40,), 3)
    other = threes.clone()
    other[7] = 4
    as_is, moved = oracle.Results([threes]), (oracle.Results([threes]), oracle.Results([other]))
    assert oracle.wrong(oracle.Results([other]), as_is, as_is)
    assert oracle.wrong(oracle.Results([other]), as_is, as_is, [moved]) == []
    assert oracle.wrong(oracle.Results([other.roll(1)]), as_is, as_is, [moved])


def _choice(first: float, second: float) -> Choice:
    """One row that chose the second of two candidates with these scores."""
    return Choice("experts", torch.tensor([[first, second]]), torch.tensor([[0]]), torch.tensor([[1]]))


def test_a_choice_is_fair_where_one_rounding_makes_the_scores_alike() -> None:
    def pair(second: float, noise: float) -> oracle.Pair:
        return (oracle.Results([], [_choice(1.0, second + noise)]), oracle.Results([], [_choice(1.0, second)]))

    apart, alike = pair(0.5, 1e-3), pair(0.9995, 1e-3)
    assert oracle.wrong(oracle.Results([]), *apart)
    assert oracle.wrong(oracle.Results([]), *apart, [apart, alike]) == []
    assert oracle.wrong(oracle.Results([]), *apart, [apart])
