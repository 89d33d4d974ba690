"""Rotations whose pairs stay side by side: half tables and complex numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.lift import rotary, rotary_pairs
from cannopy.fusion_rules.lower import interleave_rope, rotary_mul
from tests.rules.moe_support import Tensor, Traced, trace

RULES = (*rotary.RULES, *rotary_pairs.RULES, rotary_mul.RULE, interleave_rope.RULE)
B, N, S = 2, 3, 5
BF16 = 2.0**-7
"""Two roundings to bf16 where the plain form has up to four."""
Form = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    dialect.register_all()
    with target.using("atlas-a3"):
        yield


def traced(form: Form, size: int) -> Traced:
    g = torch.Generator().manual_seed(0)
    x = torch.randn((B, N, S, size), generator=g).bfloat16()
    return trace(form, x, torch.rand((B, S, size // 2), generator=g) * 6)


def tables(x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos().to(x.dtype).unsqueeze(1), angles.sin().to(x.dtype).unsqueeze(1)


def turned(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1)


def sliced(x: Tensor, angles: Tensor) -> Tensor:
    return turned(x[..., 0::2], x[..., 1::2], *tables(x, angles)).flatten(-2)


def unbound(x: Tensor, angles: Tensor) -> Tensor:
    return turned(*x.unflatten(-1, (-1, 2)).unbind(-1), *tables(x, angles)).view(x.shape)


def selected(x: Tensor, angles: Tensor) -> Tensor:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return turned(pairs[..., 0], pairs[..., 1], *tables(x, angles)).flatten(-2)


def back(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = tables(x, angles)
    return turned(x[..., 0::2], x[..., 1::2], cos, -sin).flatten(-2)


def back_written(x: Tensor, angles: Tensor) -> Tensor:
    (cos, sin), even, odd = tables(x, angles), x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)


def complexes(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


EXACT: dict[str, tuple[Form, int, str]] = {
    "slices of 64": (sliced, 64, "npu_interleave_rope"),
    "slices of 128": (sliced, 128, "npu_rotary_mul"),
    "unbound": (unbound, 128, "npu_rotary_mul"),
    "selected": (selected, 64, "npu_interleave_rope"),
    "back": (back, 128, "npu_rotary_mul"),
    "back, written out": (back_written, 64, "npu_interleave_rope"),
    "complex numbers": (complexes, 128, "npu_rotary_mul"),
}


@pytest.mark.parametrize("name", EXACT)
def test_fires_on_exact_forms(name: str) -> None:
    form, size, kernel = EXACT[name]
    before = traced(form, size)
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rotary": 1, kernel.removeprefix("npu_"): 1}
    assert log.misses == []
    assert len(after.calls(kernel)) == 1
    assert not {"aten.stack.default", "aten.sub.Tensor"} & set(after.operations())
    exact = form(*(t.double() for t in before.values.values()))
    (found,), (plain,) = after.run(), before.run()
    assert found.shape == plain.shape
    assert float((found - exact).abs().max()) <= float((plain - exact).abs().max()) + 2.0**-20
    torch.testing.assert_close(found.double(), exact, rtol=BF16, atol=2 * BF16)


def test_fires_on_llama_4() -> None:
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    def form(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = apply_rotary_emb(q, k, torch.polar(torch.ones_like(angles), angles))
        return found

    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn((B, S, heads, 128), generator=g).bfloat16() for heads in (4, 2))
    before = trace(form, q, k, torch.rand((B, S, 64), generator=g) * 6)
    after, log = before.fused(RULES)
    assert log.counts() == {"lift_rotary": 2, "rotary_mul": 2}
    for found, plain in zip(after.run(), before.run(), strict=True):
        torch.testing.assert_close(found, plain, rtol=BF16, atol=BF16 / 4)


def _other_dim(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = tables(x, angles)
    return torch.stack((x[..., 0::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., 0::2] * sin), -2)


def _halves(x: Tensor, angles: Tensor) -> Tensor:
    return turned(*x.chunk(2, -1), *tables(x, angles)).flatten(-2)


def _two_tensors(x: Tensor, angles: Tensor) -> Tensor:
    return turned(x[..., 0::2], (x + 1)[..., 1::2], *tables(x, angles)).flatten(-2)


def _mirrored(x: Tensor, angles: Tensor) -> Tensor:
    return turned(x[..., 1::2], x[..., 0::2], *tables(x, angles)).flatten(-2)


def _one_sign(x: Tensor, angles: Tensor) -> Tensor:
    (cos, sin), even, odd = tables(x, angles), x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos - even * sin), -1).flatten(-2)


def _one_angle(x: Tensor, angles: Tensor) -> Tensor:
    return sliced(x, angles[..., :1])


def _wide_tables(x: Tensor, angles: Tensor) -> Tensor:
    return turned(x[..., 0::2], x[..., 1::2], *tables(x.float(), angles)).flatten(-2)


def _first_row(x: Tensor, angles: Tensor) -> Tensor:
    return sliced(x[:1], angles)


REFUSES: dict[str, tuple[Form, str]] = {
    "stacked elsewhere": (_other_dim, "stacked along dim"),
    "halves": (_halves, "no neighbours of one tensor: aten.slice bfloat16[2, 3, 5, 64] and aten.slice"),
    "two tensors": (_two_tensors, "no neighbours of one tensor"),
    "mirrored": (_mirrored, "no neighbours of one tensor"),
    "one sign": (_one_sign, "found aten.sub"),
    "one angle": (_one_angle, "cos does not have 64 entries in its last dim"),
    "tables in fp32": (_wide_tables, "the rotation mixes dtypes: x bfloat16 ("),
    "one row for all tables": (_first_row, "cos broadcasts the rotated tensor to another shape"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    form, reason = REFUSES[name]
    before = traced(form, 128)
    after, log = before.fused(RULES)
    assert not {"lift_rotary", "rotary_mul", "interleave_rope"} & set(log.counts())
    assert any(reason in m.reason for m in log.misses), log.misses
    for found, plain in zip(after.run(), before.run(), strict=True):
        torch.testing.assert_close(found, plain, rtol=2 * BF16, atol=2 * BF16)
