"""Both places of rounding fuse; look-alikes do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.engine.apply import Log
from cannopy.fusion_rules.lower import add_rms_norm, rms_norm
from cannopy.fx_passes import normalise
from tests.rules.support import Case, fresh, fuse, run

ULP = 2.0**-7
"""One unit in the last place of bf16, relative."""


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


class Norm(nn.Module):
    """x.float() normalised; ``form`` says how gamma comes in."""

    def __init__(self, form: Callable[..., torch.Tensor], gamma_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((1 + 0.3 * torch.randn(128)).to(gamma_dtype))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.form(self.weight, normed, x)


def _fused(model: nn.Module) -> tuple[Case, Log, torch.Tensor, torch.Tensor]:
    dialect.register_all()
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    program = capture(model, "forward", (x,))
    normalise.run(program)
    case = Case(model, (x,), {}, program)
    rewritten = fresh(case)
    log = fuse(rewritten, (*catalog.LIFT, add_rms_norm.RULE, rms_norm.RULE))
    return case, log, run(case, fresh(case))[0][0], run(case, rewritten)[0][0]


FORMS = {
    "llama": lambda w, n, x: w * n.to(x.dtype),
    "gamma_first": lambda w, n, x: (w * n).to(x.dtype),
    "gamma_widened": lambda w, n, x: (n * w.float()).to(x.dtype),
}


@pytest.mark.parametrize("form", FORMS)
def test_rounding_before_or_after_gamma(form: str) -> None:
    _, log, expected, found = _fused(Norm(FORMS[form]))
    assert log.counts()["rms_norm"] == 1
    assert not log.misses
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


@pytest.mark.parametrize("factor", [
    lambda x: torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + 1e-5),
    lambda x: torch.rsqrt(x.square().sum(-1)[..., None] / 128 + 1e-5),
    lambda x: torch.rsqrt(x.pow(2).mean(-1) + 1e-5).view(-1, 1),
    lambda x: (x.square().sum(-1) / 128 + 1e-5).sqrt().reciprocal().unsqueeze(1),
], ids=["mean", "sum", "mean, far", "sum, far"])
def test_the_last_dim_may_come_back_later(factor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Norm(lambda w, n, x: w * (x.float() * factor(x.float())).to(x.dtype))
    _, log, expected, found = _fused(model)
    assert log.counts()["rms_norm"] == 1
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


def test_a_norm_in_bf16_says_what_is_missing() -> None:
    model = Norm(lambda w, n, x: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)))
    (miss,) = [m for m in _fused(model)[1].misses if m.near]
    assert miss.expected == "float32 inside the norm"
    assert miss.found.startswith("an input or weight bfloat16[5, 128], read by aten.mul (")
    assert miss.remedy == "make it float32 inside the norm"


@pytest.mark.parametrize(("use", "found"), [
    (lambda x, f: x + f, "aten.add float32[5, 128] ("), (lambda x, f: x - f, "aten.sub float32[5, 128] ("),
    (lambda x, f: x / f, "aten.div float32[5, 128] (")], ids=["sum", "difference", "quotient"])
def test_a_factor_that_is_not_multiplied_says_what_is_done_with_it(
        use: Callable[..., torch.Tensor], found: str) -> None:
    model = Norm(lambda w, n, x: w * use(x.float(), torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)))
    (miss,) = [m for m in _fused(model)[1].misses if m.near]
    assert (miss.rule, miss.expected) == ("lift_rms_norm", "aten.mul with wide")
    assert miss.found.startswith(found)


class TwoNorms(nn.Module):
    """The second one takes the factor of the first: ``wrong``, or has its own."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.float(), x.float().tanh()
        first, second = (torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) for v in (a, a if self.wrong else b))
        return w * (a * first), (b * second).exp()


@pytest.mark.parametrize("wrong", [True, False])
def test_a_norm_with_the_factor_of_another_is_told_beside_that_one(wrong: bool) -> None:
    dialect.register_all()
    inputs = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)), torch.ones(128)
    program = capture(TwoNorms(wrong), "forward", inputs)
    normalise.run(program)
    log = fuse(program, (*catalog.LIFT, add_rms_norm.RULE, rms_norm.RULE))
    assert log.counts()["rms_norm"] == 2 - wrong
    misses = [m for m in log.misses if m.near]
    assert len(misses) == wrong, misses
    assert not wrong or "expected the same wide (aten.tanh" in misses[0].reason


def test_torch_rms_norm() -> None:
    _, log, expected, found = _fused(nn.RMSNorm(128, eps=1e-5).bfloat16().requires_grad_(False))
    assert log.counts()["rms_norm"] == 1
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


WIDE = {
    "one_plus_gamma": (lambda w, n, x: ((1 + w.float()) * n).to(x.dtype), torch.bfloat16),
    "fp32_gamma": (lambda w, n, x: (w * n).to(x.dtype), torch.float32),
}


@pytest.mark.parametrize("form", WIDE)
def test_a_norm_with_fp32_gamma_is_one_in_fp32(form: str) -> None:
    """Gamma as the model computes it (1 + w is not w) goes into an fp32 norm; the cast of the result stays."""
    _, log, expected, found = _fused(Norm(*WIDE[form]))
    assert log.counts()["rms_norm"] == 1
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


LOOK_ALIKES = {
    "fp32_result": lambda w, n, x: w * n,
    "other_dtype": lambda w, n, x: (w * n).half(),
}


@pytest.mark.parametrize("form", LOOK_ALIKES)
def test_gamma_stays_outside_where_the_op_would_round_before_it(form: str) -> None:
    _, log, expected, found = _fused(Norm(LOOK_ALIKES[form]))
    assert log.counts()["rms_norm"] == 1
    assert any(a.reason.startswith("the norm mixes dtypes: ") for a in log.attempts)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-6 if form == "fp32_result" else 1e-3, atol=1e-6)


def test_a_number_is_no_gamma() -> None:
    """It stays a product behind a norm without gamma."""
    _, log, expected, found = _fused(Norm(lambda w, n, x: 0.5 * n.to(x.dtype)))
    assert log.counts()["rms_norm"] == 1
    assert any(a.reason == "gamma is the number 0.5, not one value for each of 128 entries" for a in log.attempts)
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


COMPUTED = {
    "one_plus": lambda w, n, x: (1 + w) * n.to(x.dtype),
    "gemma": lambda w, n, x: (n * (1.0 + w.float())).to(x.dtype),
    "leading_dims": lambda w, n, x: w.view(1, -1) * n.to(x.dtype),
    "none": lambda w, n, x: n.to(x.dtype),
}


@pytest.mark.parametrize("form", COMPUTED)
def test_gamma_may_be_computed_or_missing(form: str) -> None:
    _, log, expected, found = _fused(Norm(COMPUTED[form]))
    assert log.counts()["rms_norm"] == 1
    assert not log.misses
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-6)


ROOTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "root + c": lambda h: h / (torch.sqrt(h.pow(2).mean(-1, keepdim=True)) + 1e-5),
    "inverse of root + c": lambda h: h * (1 / (torch.sqrt((h * h).mean(-1, keepdim=True)) + 1e-5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROOTS)
def test_a_norm_that_adds_c_to_the_root_is_told_of(name: str, dtype: torch.dtype) -> None:
    _, log, plain, rewritten = _fused(Norm(lambda w, n, x: w * ROOTS[name](x.to(dtype)).to(x.dtype)))
    (miss,) = [m for m in log.misses if m.rule == "lift_rms_norm"]
    assert "then expected aten.rsqrt" in miss.reason
    assert "found aten.sqrt" in miss.reason
    assert torch.equal(plain, rewritten)


def test_a_refused_norm_is_told_of_once() -> None:
    """The form with gamma has the one without inside it."""
    def over_tokens(w: torch.Tensor, n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + 1e-5)).to(x.dtype)

    def fp32_sum(w: torch.Tensor, n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() + x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    for form, reason in ((over_tokens, "the mean is over dim 0"), (fp32_sum, "the norm mixes dtypes")):
        _, log, _, _ = _fused(Norm(form))
        assert [m.reason[:len(reason)] for m in log.misses if m.rule == "lift_rms_norm"] == [reason]
    assert [m.remedy for m in log.misses if m.rule == "lift_rms_norm"] == [
        "give the norm its input in bfloat16, the dtype of the result"]
