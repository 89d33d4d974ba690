"""Limits: what passes, and that a wrong result does not."""

import io
import math

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from cannopy.cli import run_view
from cannopy.page import _parity as page
from cannopy.page import charts
from cannopy.parity.call import check
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
from cannopy.parity.reference import all_in_float64, in_float64


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
        ((0.125, 0.15), (0.1, 0.1), []),
        ((0.126, 0.1), (0.1, 0.1), ["median"]),
        ((0.1, 0.151), (0.1, 0.1), ["p90"]),
        ((math.nan, math.nan), (0.1, 0.1), ["median", "p90"]),
        ((0.0, 0.0), (0.0, 0.0), []),
        ((1.8e-6, 1.8e-6), (9e-7, 9e-7), []),
        ((2e-6, 2e-6), (9e-7, 9e-7), ["median", "p90"]),
    ],
)
def test_error_limits(ours, plain, failing):
    part = ErrorParity("decode", Errors(8, *ours, 9.0), Errors(8, *plain, 9.0))
    assert [word for word in ("median", "p90") if any(f" {word} " in f for f in part.failures)] == failing
    assert ParityReport([part]).passed is (not failing)


def test_a_plain_run_that_is_wrong_itself_is_no_measure():
    exact = torch.randn(100, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = torch.randn(100, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for plain in (other, exact * math.nan):
        failures = errors_of("decode", exact, plain, exact).failures
        assert any("no measure" in sentence for sentence in failures)


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

    part = ErrorParity("prefill", Errors(1, 0.1, 0.1, 0.1), Errors(1, 0.1, 0.1, 0.1))
    data = ParityReport([part], [_one([[0, 1]], [[0.9, 0.8, 0.5, 0.1]])]).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["passed"] is True


def test_rows_that_are_nan_in_both_are_alike_and_in_one_are_not():
    nan, inf = math.nan, math.inf
    exact = torch.tensor([[nan, nan], [3.0, 4.0], [3.0, inf], [nan, 1.0], [3.0, 4.0]], dtype=torch.float64)
    result = torch.tensor([[nan, nan], [3.0, 4.5], [3.0, inf], [0.0, 1.0], [nan, 4.0]], dtype=torch.float64)
    found = token_errors(result, exact).tolist()
    assert found[:3] == [0.0, 0.1, 0.0]
    assert all(map(math.isnan, found[3:]))
    assert ErrorParity("call", Errors.of(torch.tensor(found)), Errors(5, 0.1, 0.1, 0.1)).failures
    assert token_errors(-exact, exact)[2].isnan() or token_errors(-exact, exact)[2] == inf


class Mixed(torch.nn.Module):
    """Parameters of ``dtype`` and a router of float32, which computes in float32."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(16, 16, bias=False, dtype=dtype)
        self.router = torch.nn.Parameter(torch.randn(4, 16))
        self.table = torch.randn(16)
        self.seen = []

    def forward(self, x):
        hidden = self.up(x)
        scores = F.softmax(F.linear(hidden.float(), self.router), dim=-1, dtype=torch.float32)
        weights, ids = scores.topk(2, dim=-1)
        chosen = torch.zeros(x.shape[0], 4, dtype=torch.float32).scatter(1, ids, weights) @ self.router
        wide = hidden.to(torch.float32) * self.table + chosen @ torch.eye(16) * torch.tensor([0.5], dtype=torch.float32)
        self.seen.append({t.dtype for t in (hidden, scores, chosen, wide)})
        return wide.to(hidden.dtype)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_a_model_of_several_dtypes_has_a_float64_run_that_is_whole(dtype, name):
    model = Mixed(dtype)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    report, _, _ = check(model, "forward", lambda x: model(x) * 1.0, (x,), {})
    assert report.failures == []
    assert report.plain == f"plain {name}"
    assert [p.kind for p in report.picks] == ["topk"]
    seen = []
    exact = in_float64(model)
    exact.seen = seen
    with all_in_float64():
        exact(x.double())
    assert seen == [{torch.float64}]
    assert torch.get_default_dtype() is torch.float32
    doubled, _, _ = check(model, "forward", lambda x: model(x) * 2.0, (x,), {})
    assert doubled.failures


def test_the_page_and_the_table_name_the_dtype_of_the_plain_run():
    part = ErrorParity("call", Errors(1, 1e-7, 1e-7, 1e-7), Errors(1, 1e-7, 1e-7, 1e-7))
    report = ParityReport([part], [PickParity("call", "topk", 1, 0, 0.0, 0)], dtype="fp32")
    for text in (page(report), charts.errors([part], report.plain)):
        assert "plain fp32" in text
        assert "bf16" not in text
    screen = Console(file=io.StringIO(), width=100)
    run_view._show_parity(screen, report)
    assert "plain fp32" in screen.file.getvalue()
    assert "bf16" not in screen.file.getvalue()
