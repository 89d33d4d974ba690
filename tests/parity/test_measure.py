"""Limits: what passes, and that a wrong result does not."""

import math

import pytest
import torch

from cannopy.parity.measure import (
    ErrorParity,
    Errors,
    ParityReport,
    PickParity,
    compare_picks,
    errors_of,
    token_errors,
)
from cannopy.parity.picks import Choice


def test_token_error_is_relative_to_the_exact_row():
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    result = exact + torch.tensor([[0.0, 0.5], [0.0, 0.0]], dtype=torch.float64)
    assert token_errors(result, exact).tolist() == [0.1, 0.0]


def test_doubled_row_has_error_one():
    exact = torch.randn(5, 7, dtype=torch.float64)
    assert token_errors(2 * exact, exact) == pytest.approx([1.0] * 5)


@pytest.mark.parametrize(
    ("ours", "plain", "failing"),
    [
        ((1.25, 1.5), (1.0, 1.0), []),
        ((1.26, 1.0), (1.0, 1.0), ["median"]),
        ((1.0, 1.51), (1.0, 1.0), ["p90"]),
        ((math.nan, math.nan), (1.0, 1.0), ["median", "p90"]),
        ((0.0, 0.0), (0.0, 0.0), []),
        ((1.8e-6, 1.8e-6), (9e-7, 9e-7), []),
        ((2e-6, 2e-6), (9e-7, 9e-7), ["median", "p90"]),
    ],
)
def test_error_limits(ours, plain, failing):
    part = ErrorParity("decode", Errors(8, *ours, 9.0), Errors(8, *plain, 9.0))
    assert [word for word in ("median", "p90") if any(f" {word} " in f for f in part.failures)] == failing
    assert ParityReport([part]).passed is (not failing)


def test_one_wrong_row_of_many_is_over_the_limit():
    exact = torch.randn(100, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, ours = exact * (1 + 1e-2), exact * (1 - 1e-2)
    assert errors_of("cache", ours, plain, exact).failures == []
    ours[37] = 0
    assert [f.partition(" error")[0] for f in errors_of("cache", ours, plain, exact).failures] == ["cache: largest"]
    few = [rows[36:40] for rows in (ours, plain, exact)]
    assert [f.partition(" error")[0] for f in errors_of("cache", *few).failures] == ["cache: largest"]


def _choices(picked, scores, noise=1e-3, seed=0):
    """A float64 and a noisy run at one recorded pick [rows, k]."""
    exact = torch.tensor(scores, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    plain = (exact + noise * torch.randn(exact.shape, generator=generator, dtype=torch.float64)).float()
    wanted = torch.tensor(picked)
    k = wanted.shape[1]
    return [Choice("keys", run, run.topk(k).indices, wanted) for run in (plain, exact)]


def _one(picked, scores, **more) -> PickParity:
    plain, exact = _choices(picked, scores, **more)
    (part,) = compare_picks("decode", [plain], [exact])
    return part


def test_best_picks_are_fair():
    part = _one([[0, 1]], [[0.9, 0.8, 0.5, 0.1]])
    assert (part.worst, part.invalid, part.failures) == (0.0, 0, [])


def test_a_tie_within_noise_is_fair():
    part = _one([[0, 2]], [[0.9, 0.801, 0.8, 0.1]])
    assert 0 < part.worst < 1
    assert part.failures == []


def test_a_worse_candidate_is_no_tie():
    part = _one([[0, 3]], [[0.9, 0.8, 0.5, 0.1]])
    assert part.worst > 1
    assert "is no tie" in part.failures[0]


@pytest.mark.parametrize(
    "picked",
    [
        pytest.param([[0, 2]], id="masked candidate"),
        pytest.param([[0, -1]], id="missing candidate"),
        pytest.param([[0, 0]], id="repeated candidate"),
    ],
)
def test_invalid_picks_fail(picked):
    part = _one(picked, [[0.9, 0.8, -math.inf, -math.inf]])
    assert part.invalid == 1
    assert any("masked, missing or repeated" in f for f in part.failures)


def test_fewer_candidates_than_k_is_valid():
    assert _one([[0, 1, -1]], [[0.9, 0.8, -math.inf, -math.inf]]).failures == []


def test_report_is_json_ready():
    import json

    part = ErrorParity("prefill", Errors(1, 1.0, 1.0, 1.0), Errors(1, 1.0, 1.0, 1.0))
    data = ParityReport([part], [_one([[0, 1]], [[0.9, 0.8, 0.5, 0.1]])]).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["passed"] is True
