"""lift_norm_scale: a number behind a norm becomes part of gamma, where everything that reads the norm has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.lift import norm_scale, rms_norm
from cannopy.models.lively import lively_
from cannopy.models.parts import RMSNorm
from tests.rules.moe_support import Tensor, Traced, assert_refused, captured, error, tokens, trace

RULES = (*rms_norm.RULES, *norm_scale.RULES)
H, OUT, SCALE = 64, 48, 12**0.5

Body = Callable[["Scaled", Tensor], Tensor | tuple[Tensor, ...]]


class Scaled(nn.Module):
    """``body`` of a norm, a linear with bias or without, and an input [tokens, H]."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm = RMSNorm(H, 1e-6)
        self.linear = nn.Linear(H, OUT, bias=False)
        self.biased = nn.Linear(H, OUT)
        self.body = body
        lively_(self, 0)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.body(self, x)


def parts(m: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts of the queries scaled apart, as the stock LongCat does."""
    first, second = m.linear(m.norm(x)).view(-1, 4, OUT // 4).transpose(0, 1).split([8, 4], dim=-1)
    return first * SCALE, second * SCALE


FIRES: dict[str, Body] = {
    "direct": lambda m, x: m.norm(x) * SCALE,
    "number first": lambda m, x: SCALE * m.norm(x),
    "view in between": lambda m, x: m.norm(x).view(-1, 1, H) * SCALE,
    "two products": lambda m, x: (m.norm(x) * SCALE, (m.norm(x) * SCALE).view(-1, 2, 32)),
    "linear": lambda m, x: m.linear(m.norm(x)) * SCALE,
    "linear and view": lambda m, x: m.linear(m.norm(x)).unflatten(-1, (4, -1)) * SCALE,
    "parts": parts,
}


def program(body: Body, dtype: torch.dtype = torch.bfloat16) -> tuple[Scaled, Tensor, Traced]:
    dialect.register_all()
    module = Scaled(body).to(dtype)
    x = tokens(1, 24, H, dtype)[0]
    return module, x, captured(module, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FIRES)
def test_fires(name: str, dtype: torch.dtype) -> None:
    module, x, before = program(FIRES[name], dtype)
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rms_norm": 1, "lift_norm_scale": 1}
    assert log.misses == []
    assert "aten.mul.Tensor" not in after.operations()
    (gamma,) = after.program.weights
    assert gamma.build([torch.full((2,), 0.5, dtype=dtype)]).dtype == dtype
    found, plain = after.run(), before.run()
    wanted = module.double()(x.double())
    for new, old, true in zip(found, plain, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert error(new, true) < (2.0**-7 if dtype == torch.bfloat16 else 1e-6)
        assert error(new, true) < 1.25 * error(old, true)


def test_fires_on_our_longcat_attention() -> None:
    """Both scales of one attention, cut from the model."""
    from cannopy.models.longcat import LongcatConfig
    from cannopy.models.mla import LatentAttention, LatentPages
    from cannopy.models.paging import Prefill

    sizes = LongcatConfig(hidden_size=96, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
                          qk_rope_head_dim=8, v_head_dim=16).attention()
    assert sizes.q_scale != 1 != sizes.kv_scale

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = LatentAttention(sizes, {"theta": 1e4})

        def forward(self, x: Tensor) -> Tensor:
            step = Prefill(x.shape[0], torch.tensor([x.shape[0]]), torch.arange(x.shape[0]))
            pages = LatentPages(x.new_zeros(2, 16, 1, 32), x.new_zeros(2, 16, 1, 8))
            angles = x.new_ones(x.shape[0], 8), x.new_zeros(x.shape[0], 8)
            return self.attention(x, angles, step, pages)

    dialect.register_all()
    module = lively_(Attention().bfloat16(), 0)
    x = tokens(1, 12, 96, torch.bfloat16)[0]
    before = captured(module, x)
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rms_norm": 2, "lift_norm_scale": 2}
    found, plain = after.run()[0], before.run()[0]
    wanted = module.double()(x.double())
    assert error(found, wanted) < 1.25 * error(plain, wanted)


REFUSES: dict[str, tuple[Body, str]] = {
    "returned too": (lambda m, x: ((y := m.norm(x)) * SCALE, y), "the method returns it"),
    "read too": (lambda m, x: (y := m.norm(x)) * SCALE + F.relu(y), "the norm is also read without the factor"),
    "another number": (lambda m, x: ((y := m.norm(x)) * SCALE, y * 2.0), "the norm is also read without the factor"),
    "infinite": (lambda m, x: m.norm(x) * float("inf"), "the norm is multiplied by inf"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    body, reason = REFUSES[name]
    _, _, before = program(body)
    lifted, _ = before.fused(rms_norm.RULES)
    assert_refused(lifted, norm_scale.RULES, reason)


OUT_OF_RANGE: dict[str, tuple[Body, torch.dtype, str]] = {
    "overflows": (lambda m, x: m.norm(x) * 65000.0, torch.float16, "gamma times 65000 may leave the range of float16"),
    "rounds away": (lambda m, x: m.norm(x) * 1e-6, torch.float16, "gamma times 1e-06 may leave the range of float16"),
    "between linears": (lambda m, x: m.linear(m.norm(x)) * 0.5, torch.float16, "a float16 linear between the norm and"),
    "both ways": (lambda m, x: ((y := m.norm(x)) * 0.5, m.linear(y) * 0.5), torch.float16, "a float16 linear between"),
    "far out": (lambda m, x: m.norm(x) * 1e-37, torch.bfloat16, "gamma times 1e-37 may leave the range of bfloat16"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_refuses_numbers_that_gamma_cannot_hold(name: str) -> None:
    body, dtype, reason = OUT_OF_RANGE[name]
    _, _, before = program(body, dtype)
    lifted, _ = before.fused(rms_norm.RULES)
    assert_refused(lifted, norm_scale.RULES, reason)


def test_fires_in_float16_near_one() -> None:
    _, _, before = program(FIRES["direct"], torch.float16)
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rms_norm": 1, "lift_norm_scale": 1}
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-10


def test_refuses_a_computed_gamma() -> None:
    dialect.register_all()
    x = tokens(1, 5, H, torch.bfloat16)[0]
    before = trace(lambda x, w: torch.ops.cannopy.rms_norm(x, w.exp(), 1e-6) * SCALE, x, x[0], parameters=[1])
    assert_refused(before, norm_scale.RULES, "gamma must be a parameter to be multiplied by")


STAYS: dict[str, Body] = {
    "a bias": lambda m, x: m.biased(m.norm(x)) * SCALE,
    "a tensor": lambda m, x: m.norm(x) * x,
    "one of two linears": lambda m, x: m.linear(y := m.norm(x)) * SCALE + m.biased(y),
    "half of the result": lambda m, x: torch.cat(((y := m.linear(m.norm(x)))[:, :24] * SCALE, y[:, 24:]), -1),
    "rounded in between": lambda m, x: m.norm(x).float() * SCALE,
}


@pytest.mark.parametrize("name", STAYS)
def test_other_products_stay(name: str) -> None:
    _, _, before = program(STAYS[name])
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rms_norm": 1}
    assert log.misses == []
    assert "aten.mul.Tensor" in after.operations()
