"""swiglu: what fires, what is refused and why, and the numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from cannopy.fusion_rules.rewrite.swiglu import RULES
from tests.rules.moe_support import Tensor, Traced, assert_refused, block, captured, error, tokens, trace

ROWS, IN, MID = 5, 48, 24
Body = Callable[..., object]


def two_linears(body: Body, dtype: torch.dtype = torch.bfloat16, parameters: tuple[int, ...] = (1, 2, 3),
                up_rows: int = MID) -> Traced:
    """``body(x, Wg, Wu, b)`` on random values; gate and up differ in scale so that a swap shows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, ROWS, IN), generator=generator)
    gate = 2 * torch.randn((MID, IN), generator=generator) / IN**0.5
    up = torch.randn((up_rows, IN), generator=generator) / IN**0.5
    bias = torch.randn(MID, generator=generator)
    return trace(body, *(t.to(dtype) for t in (x, gate, up, bias)), parameters=parameters)


def one_tensor(body: Body, dtype: torch.dtype = torch.bfloat16) -> Traced:
    """``body(a)`` for a [2, 5, 48]."""
    return trace(body, (2 * torch.randn((2, ROWS, 2 * MID), generator=torch.Generator().manual_seed(0))).to(dtype))


def half(a: Tensor, i: int) -> Tensor:
    return a[..., i * MID:(i + 1) * MID]


TWO: dict[str, Body] = {
    "silu first": lambda x, g, u, b: F.silu(F.linear(x, g)) * F.linear(x, u),
    "silu second": lambda x, g, u, b: F.linear(x, u) * F.silu(F.linear(x, g)),
    "fp32 inside": lambda x, g, u, b: (F.silu(F.linear(x, g).float()) * F.linear(x, u).float()).type_as(x),
    "fp32 silu": lambda x, g, u, b: F.silu(F.linear(x, g).float()).type_as(x) * F.linear(x, u),
}
ONE: dict[str, Body] = {
    "chunk": lambda a: F.silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1],
    "split": lambda a: a.split(MID, -1)[1] * F.silu(a.split(MID, -1)[0]),
    "slices": lambda a: F.silu(a[..., :MID]) * a[..., MID:],
    "fp32 whole": lambda a: (F.silu(half(a.float(), 0)) * half(a.float(), 1)).type_as(a),
    "fp32 halves": lambda a: (F.silu(half(a, 0).float()) * half(a, 1).float()).type_as(a),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", TWO)
def test_merges_two_linears(name: str, dtype: torch.dtype) -> None:
    before = two_linears(TWO[name], dtype)
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert after.operations() == ["aten.linear.default", "npu.npu_swiglu.default"]
    (entry,) = after.program.weights
    assert entry.recipe == "torch.cat((w[0], w[1]))"
    x, gate, up, _ = (t.double() for t in before.values.values())
    wanted = F.silu(x @ gate.T) * (x @ up.T)
    # One rounding of gate and up, one of the result, each half a unit in the last place.
    assert error(after.run()[0], wanted) < (2.0**-8 if dtype == torch.bfloat16 else 1e-6)
    assert error(after.run()[0], wanted) < 1.1 * error(before.run()[0], wanted) + 1e-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ONE)
def test_takes_halves_of_one_tensor(name: str, dtype: torch.dtype) -> None:
    before = one_tensor(ONE[name], dtype)
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert after.operations() == ["npu.npu_swiglu.default"]
    (a,) = (t.double() for t in before.values.values())
    wanted = F.silu(half(a, 0)) * half(a, 1)
    # bf16 is rounded once at the end; fp32 at exp, sigmoid and both products.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 4 * 2.0**-23
    assert ((after.run()[0].double() - wanted).abs() <= unit * wanted.abs() + 1e-30).all()


def test_merges_biases() -> None:
    before = two_linears(lambda x, g, u, b: F.silu(F.linear(x, g, b)) * F.linear(x, u, 2 * b[0] + b), torch.float32)
    assert before.fused(RULES)[1].hits == []
    before = two_linears(lambda x, g, u, b: F.silu(F.linear(x, g, b)) * F.linear(x, u, b), torch.float32)
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert len(after.program.weights) == 2
    x, gate, up, bias = (t.double() for t in before.values.values())
    assert error(after.run()[0], F.silu(x @ gate.T + bias) * (x @ up.T + bias)) < 1e-6


def test_tokens_that_the_model_folds_itself() -> None:
    """An expert that all tokens share is often called with [tokens, hidden] (Qwen2-MoE)."""
    def folded(x: Tensor, gate: Tensor, up: Tensor, _: Tensor) -> Tensor:
        rows = x.view(-1, IN)
        return F.silu(F.linear(rows, gate)) * F.linear(rows, up)

    before = two_linears(folded)
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-7


def test_merged_linear_and_slices_become_one_op() -> None:
    weight = torch.randn((2 * MID, IN), generator=torch.Generator().manual_seed(1))
    x = tokens(1, 3, IN, torch.float32)
    before = trace(lambda x, w: F.silu(half(F.linear(x, w), 0)) * half(F.linear(x, w), 1), x, weight, parameters=[1])
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert after.program.weights == []
    assert error(after.run()[0], before.run()[0].double()) < 1e-6


def test_halves_that_others_read_stay() -> None:
    before = one_tensor(lambda a: (F.silu(half(a, 0)) * half(a, 1), half(a, 0) + 1))
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    assert torch.equal(after.run()[1], before.run()[1])


REFUSES: dict[str, tuple[Callable[[], Traced], str]] = {
    "gelu": (lambda: two_linears(lambda x, g, u, b: F.gelu(F.linear(x, g)) * F.linear(x, u)),
             "the activation is aten.gelu.default, npu_swiglu has SiLU"),
    "one up for all": (lambda: two_linears(lambda x, g, u, b: F.silu(F.linear(x, g)) * F.linear(x, u), up_rows=1),
                       f"[{MID}, {IN}] and up weight torch.bfloat16[1, {IN}] do not merge"),
    "gelu tanh": (lambda: two_linears(lambda x, g, u, b: F.gelu(F.linear(x, g), approximate="tanh") * F.linear(x, u)),
                  "aten.gelu"),
    "quick gelu": (lambda: one_tensor(lambda a: half(a, 0) * torch.sigmoid(1.702 * half(a, 0)) * half(a, 1)),
                   "the activation is x * sigmoid(1.702 * x), npu_swiglu has SiLU"),
    "glu": (lambda: one_tensor(lambda a: half(a, 0) * torch.sigmoid(half(a, 1))), "aten.sigmoid"),
    "clamped gate": (lambda: two_linears(lambda x, g, u, b: F.silu(F.linear(x, g).clamp(max=1.0)) * F.linear(x, u)),
                     "values are clamped"),
    "clamped up": (lambda: one_tensor(lambda a: F.silu(half(a, 0)) * half(a, 1).clamp(-1, 1)), "values are clamped"),
    "swapped halves": (lambda: one_tensor(lambda a: half(a, 0) * F.silu(half(a, 1))), "found the second half"),
    "interleaved": (lambda: one_tensor(lambda a: F.silu(a[..., ::2]) * a[..., 1::2]), "SiLU must be on the first half"),
    "same half": (lambda: one_tensor(lambda a: F.silu(half(a, 0)) * half(a, 0)), "SiLU must be on the first half"),
    "part of a": (lambda: one_tensor(lambda a: F.silu(a[..., :8]) * a[..., 8:16]), "SiLU must be on the first half"),
    "fp32 result": (lambda: one_tensor(lambda a: F.silu(half(a, 0).float()) * half(a, 1).float()),
                    "the product stays torch.float32"),
    "fp64": (lambda: one_tensor(lambda a: F.silu(half(a, 0)) * half(a, 1), torch.float64), "[clause input-dtype"),
    "rounded inside": (lambda: one_tensor(lambda a: (F.silu(half(a, 0)).bfloat16() * half(a, 1).bfloat16()).float(),
                                          torch.float32), "is rounded to torch.bfloat16 inside the product"),
    "rounded twice": (lambda: one_tensor(
        lambda a: (F.silu(half(a, 0).half().float()) * half(a, 1).float()).type_as(a)),
        "is rounded to torch.float16 inside the product"),
    "gate read": (lambda: two_linears(lambda x, g, u, b: (F.silu(F.linear(x, g)) * F.linear(x, u), F.linear(x, g) + 1)),
                  "is also read by aten.add"),
    "gate returned": (lambda: two_linears(
        lambda x, g, u, b: (F.silu(F.linear(x, g)) * F.linear(x, u), F.linear(x, g))),
        "the gate projection is an output of the method, so it must be computed anyway"),
    "up read": (lambda: two_linears(lambda x, g, u, b: (F.silu(F.linear(x, g)) * F.linear(x, u), F.linear(x, u) + 1)),
                "is also read by aten.add"),
    "product read": (lambda: two_linears(
        lambda x, g, u, b: ((p := F.silu(F.linear(x, g).float()) * F.linear(x, u).float()).type_as(x), p + 1)),
        "the product, before it is cast, is also read by aten.add"),
    "one bias": (lambda: two_linears(lambda x, g, u, b: F.silu(F.linear(x, g, b)) * F.linear(x, u)),
                 "only one of the gate and up projections has a bias"),
    "weight is an argument": (lambda: two_linears(TWO["silu first"], parameters=(2, 3)), "is a model argument"),
    "weight is computed": (lambda: two_linears(lambda x, g, u, b: F.silu(F.linear(x, 2 * g)) * F.linear(x, u)),
                           "is computed in every step"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, reason = REFUSES[name]
    before = make()
    after = assert_refused(before, RULES, reason)
    assert all(torch.equal(a, b) for a, b in zip(after.run(), before.run(), strict=True))


def test_different_inputs_do_not_match() -> None:
    before = two_linears(lambda x, g, u, b: F.silu(F.linear(x, g)) * F.linear(x + 1, u))
    assert before.fused(RULES)[1].hits == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 96), (8, 1)])
def test_fires_on_the_stock_mlp(dtype: torch.dtype, batch: int, length: int) -> None:
    mlp = block(dtype).shared_experts
    x = tokens(batch, length, 64, dtype)
    before = captured(mlp, x)
    after, log = before.fused(RULES)
    assert log.counts() == {"swiglu": 1}
    wide = {k: v.double() for k, v in mlp.state_dict().items()}
    gate, up = (x.double() @ wide[f"{k}_proj.weight"].T for k in ("gate", "up"))
    wanted = (F.silu(gate) * up) @ wide["down_proj.weight"].T
    # Three roundings along the way: gate and up, their product, the result.
    assert error(after.run()[0], wanted) < (2.0**-8 if dtype == torch.bfloat16 else 1e-6)
    assert error(after.run()[0], wanted) < 1.1 * error(before.run()[0], wanted) + 1e-8
