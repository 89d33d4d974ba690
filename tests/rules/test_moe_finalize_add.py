"""A dense MLP that is added in the step before the experts' result joins it: forms, refusals, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.fusion_rules.rewrite import moe_finalize_add
from tests.rules.moe_support import Tensor, assert_refused, error, trace

T, K, H = 6, 4, 32
RULES = (moe_finalize_add.RULE,)
BF16 = 2.0**-8
"""Relative error of the norm: the fused form rounds twice by 2^-9 at most, relative to values of about one size."""

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Rows of the experts, weights of the pairs, the residual and the MLP's result."""
    g = torch.Generator().manual_seed(3)
    rows, residual, mlp = (torch.randn((n, H), generator=g).to(dtype) for n in (T * K, T, T))
    return rows, torch.rand((T, K), generator=g), residual, mlp


def finalize(rows: Tensor, weights: Tensor, *added: Tensor) -> Tensor:
    index = torch.arange(T * K, dtype=torch.int32).flip(0)
    skips = [*added, None, None][:2]
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(rows, *skips, None, weights, index, None, drop_pad_mode=2)
    return out


def plain(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual + mlp.neg()) + finalize(rows, weights)


def turned(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return finalize(rows, weights) + (mlp.neg() + residual)


def with_share(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual + mlp.neg()) + finalize(rows, weights, mlp)


def batched(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    """As stock models have it, [batch, length, hidden]."""
    wide = (residual.view(2, 3, H) + mlp.neg().view(2, 3, H)) + finalize(rows, weights).view(2, 3, H)
    return wide * 2


def exact(form: Form) -> Tensor:
    """The form in float64; the sum over the experts by hand."""
    rows, weights, residual, mlp = (t.double() for t in operands())
    out = residual - mlp + (weights[..., None] * rows.flip(0).view(T, K, H)).sum(1)
    return out + mlp if form is with_share else 2 * out.view(2, 3, H) if form is batched else out


@pytest.mark.parametrize("form", [plain, turned, with_share, batched])
def test_fires_on_exact_forms(form: Form) -> None:
    before = trace(form, *operands())
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_finalize_add": 1}
    assert after.operations().count("aten.add.Tensor") == 1
    (call,) = (n for n in after.program.gm.graph.nodes if "finalize" in str(n.target))
    assert sum(call.args[i] is not None for i in (1, 2)) == 1 + (form is with_share)
    assert "neg" in str(call.args[2 if form is with_share else 1])
    found, wanted = after.run()[0], exact(form)
    assert error(found, wanted) < BF16
    assert error(found, wanted) < 1.25 * error(before.run()[0], wanted)


def returned(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + mlp
    return total + finalize(rows, weights), total


def scaled(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual + 1.5) + finalize(rows, weights, mlp)


@pytest.mark.parametrize("form", [returned, scaled], ids=["the sum is read elsewhere", "a number is added"])
def test_another_sum_is_no_near_miss(form: Form) -> None:
    before = trace(form, *operands())
    after, log = before.fused(RULES)
    assert log.hits == []
    assert [m for m in log.misses if m.near] == []
    assert after.operations() == before.operations()


def full(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual + mlp) + finalize(rows, weights, mlp, residual)


def read_twice(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> tuple[Tensor, Tensor]:
    routed = finalize(rows, weights)
    return (residual + mlp) + routed, routed * 2


def wide(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual.float() + mlp.float()) + finalize(rows, weights)


def row(rows: Tensor, weights: Tensor, residual: Tensor, mlp: Tensor) -> Tensor:
    return (residual + mlp[:1]) + finalize(rows, weights)


REFUSES = {
    "already adds two tensors": full,
    "the experts' result is also read by": read_twice,
    "the sum before the experts' result has float32": wide,
    f"the sum before the experts' result has bfloat16[1, {H}]": row,
}


@pytest.mark.parametrize("reason", REFUSES)
def test_refuses(reason: str) -> None:
    assert_refused(trace(REFUSES[reason], *operands()), RULES, reason)
