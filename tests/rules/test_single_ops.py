"""Rotary, norms and attention as single ops: exact forms, broken conditions with their reasons, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.lift import attention, rms_norm, rotary
from cannopy.fusion_rules.lower import add_rms_norm, interleave_rope, rotary_mul
from tests.rules.moe_support import Tensor, Traced, trace

B, N, S, D = 2, 3, 5, 64
ROTARY = (*rotary.RULES, rotary_mul.RULE, interleave_rope.RULE)
NORM = (*rms_norm.RULES, add_rms_norm.RULE)
BF16 = 2.0**-7
"""Two roundings to bf16 where the plain form has up to four."""


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    dialect.register_all()
    with target.using("atlas-a3"):
        yield


def _angles(dtype: torch.dtype) -> Tensor:
    return torch.rand(B, S, D // 2, generator=torch.Generator().manual_seed(1)).mul(6).to(dtype)


def _x(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*(size or (B, N, S, D)), generator=torch.Generator().manual_seed(0)).to(dtype)


def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.cat((angles, angles), -1)
    return whole.cos().unsqueeze(1), whole.sin().unsqueeze(1)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def half(x: Tensor, angles: Tensor) -> Tensor:
    """Llama."""
    cos, sin = _tables(angles)
    return x * cos + _turned(x) * sin


def tokens_first(x: Tensor, angles: Tensor) -> Tensor:
    """The indexer: heads behind the tokens."""
    cos, sin = (t.squeeze(1).unsqueeze(2) for t in _tables(angles))
    x = x.transpose(1, 2)
    return x * cos + _turned(x) * sin


def slices(x: Tensor, angles: Tensor) -> Tensor:
    """DeepSeek in transformers from 5.14 on."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def apart(x: Tensor, angles: Tensor) -> Tensor:
    """DeepSeek in transformers before 5.14."""
    b, h, s, d = x.shape
    return half(x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d), angles)


def heads_of_tokens(x: Tensor, angles: Tensor) -> Tensor:
    """Packed tokens [T, N, D], as our zoo rotates queries."""
    cos, sin = (t.flatten(0, 1)[:, None] for t in (angles.cos(), angles.sin()))
    return _neighbours(x.transpose(1, 2).flatten(0, 1), cos, sin)


def one_head(x: Tensor, angles: Tensor) -> Tensor:
    """Packed tokens [T, D], as our zoo rotates the key that all heads share."""
    return _neighbours(x[:, 0].flatten(0, 1), angles.cos().flatten(0, 1), angles.sin().flatten(0, 1))


def one_table(x: Tensor, angles: Tensor) -> Tensor:
    """All sequences at the same positions."""
    return _neighbours(x, angles[:1].cos().unsqueeze(1), angles[:1].sin().unsqueeze(1))


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def halves_of_tokens(x: Tensor, angles: Tensor) -> Tensor:
    """Packed tokens [T, N, D] in halves, as our Qwen rotates."""
    cos, sin = (t.flatten(0, 2)[:, None] for t in _tables(angles))
    x = x.transpose(1, 2).flatten(0, 1)
    return x * cos + _turned(x) * sin


def halves_of_one_head(x: Tensor, angles: Tensor) -> Tensor:
    """[B, S, D]: no heads."""
    cos, sin = (t.squeeze(1) for t in _tables(angles))
    return x[:, 0] * cos + _turned(x[:, 0]) * sin


def tables_of_positions(x: Tensor, angles: Tensor) -> Tensor:
    """Tables [S, D] without the dims of requests and heads, which the product broadcasts."""
    cos, sin = (torch.cat((t, t), -1) for t in (angles[0].cos(), angles[0].sin()))
    return x * cos + _turned(x) * sin


def tables_of_positions_tokens_first(x: Tensor, angles: Tensor) -> Tensor:
    """[B, S, N, D] with tables [S, 1, D]."""
    cos, sin = (torch.cat((t, t), -1)[:, None] for t in (angles[0].cos(), angles[0].sin()))
    x = x.transpose(1, 2)
    return x * cos + _turned(x) * sin


def pairs_of_positions(x: Tensor, angles: Tensor) -> Tensor:
    return _neighbours(x, angles[0].cos(), angles[0].sin())


FORMS = {
    "half": (half, {"lift_rotary_half": 1, "rotary_mul": 1}, "npu_rotary_mul"),
    "tokens first": (tokens_first, {"lift_rotary_half": 1, "rotary_mul": 1}, "npu_rotary_mul"),
    "tables of positions": (tables_of_positions, {"lift_rotary_half": 1, "rotary_mul": 1}, "npu_rotary_mul"),
    "tables of positions, tokens first": (tables_of_positions_tokens_first, {"lift_rotary_half": 1, "rotary_mul": 1},
                                          "npu_rotary_mul"),
    "pairs of positions": (pairs_of_positions, {"lift_rotary": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "slices": (slices, {"lift_rotary": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "apart": (apart, {"lift_rotary_half": 1, "lift_rotary_apart": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "heads of tokens": (heads_of_tokens, {"lift_rotary": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "one head": (one_head, {"lift_rotary": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "one table": (one_table, {"lift_rotary": 1, "interleave_rope": 1}, "npu_interleave_rope"),
    "halves of tokens": (halves_of_tokens, {"lift_rotary_half": 1, "rotary_mul": 1}, "npu_rotary_mul"),
    "halves of one head": (halves_of_one_head, {"lift_rotary_half": 1, "rotary_mul": 1}, "npu_rotary_mul"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rotary(name: str) -> None:
    fn, counts, kernel = FORMS[name]
    inputs = _x(torch.bfloat16), _angles(torch.bfloat16)
    before = trace(fn, *inputs)
    after, log = before.fused(ROTARY)
    assert log.counts() == counts
    assert len([t for t in after.operations() if kernel in t]) == 1
    assert not {"aten.neg.default", "aten.sub.Tensor"} & set(after.operations())
    exact = fn(inputs[0].double(), inputs[1].double())
    (found,), (plain,) = after.run(), before.run()
    assert float((found - exact).abs().max()) <= float((plain - exact).abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=BF16, atol=2 * BF16)


def test_interleaved_and_halves_are_different_rotations() -> None:
    x, angles = _x(torch.float32), _angles(torch.float32)
    torch.testing.assert_close(apart(x, angles), slices(x, angles), rtol=1e-5, atol=1e-6)
    assert float((half(x, angles) - slices(x, angles)).abs().max()) > 0.5


def _wrong_pairs(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x[..., :D:2], x[..., 0:D:2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _mirrored(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((odd * sin - even * cos, odd * cos + even * sin), -1)


def _mirrored_back(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos + odd * sin, even * sin - odd * cos), -1)


def _quarters(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = _tables(angles)
    return x * cos + torch.cat((-x[..., D // 4 :], x[..., : D // 4]), -1) * sin


def _other_halves(x: Tensor, angles: Tensor) -> Tensor:
    whole = torch.cat((angles, angles * 2), -1)
    return x * whole.cos().unsqueeze(1) + _turned(x) * whole.sin().unsqueeze(1)


def _other_permutation(x: Tensor, angles: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return half(x.view(b, h, s, 2, d // 2).transpose(4, 3).reshape(b, h, s, d), angles)


def _broadcast(x: Tensor, angles: Tensor) -> Tensor:
    return half(x[:1, :, :1], angles)


def _more_dims(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (t.unsqueeze(0) for t in _tables(angles))
    return x * cos + _turned(x) * sin


def _one_angle(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles[:, :, :1].cos().unsqueeze(1), angles[:, :, :1].sin().unsqueeze(1)
    return x * cos + _turned(x) * sin


def _twice(x: Tensor, angles: Tensor) -> Tensor:
    """[B, 2, S, N, D] with tables [B, 1, S, 1, D]: tokens neither first nor last."""
    cos, sin = (t.unsqueeze(-2) for t in _tables(angles))
    x = torch.stack((x, x + 1), 1).transpose(2, 3)
    return x * cos + _turned(x) * sin


def _twice_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    x = torch.stack((x, x + 1), 1).transpose(2, 3)
    return _neighbours(x, angles.cos()[:, None, :, None], angles.sin()[:, None, :, None])


ROTARY_REFUSALS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, torch.dtype]] = {
    "pairs": (_wrong_pairs, "the rotated pairs are neither even/odd elements nor halves", torch.bfloat16),
    "mirrored": (_mirrored, "the pairs are mirrored, not rotated: aten.sub with its operands", torch.bfloat16),
    "mirrored back": (_mirrored_back, "the pairs are mirrored, not rotated: aten.sub with its operands",
                      torch.bfloat16),
    "quarters": (_quarters, "the rotated parts are not the two halves of the last dim", torch.bfloat16),
    "other halves": (_other_halves, "cos is not provably made from cat(angles, angles), but from aten.cat bfloat16",
                     torch.bfloat16),
    "broadcast": (_broadcast, "cos broadcasts the rotated tensor to another shape", torch.bfloat16),
    "more dims": (_more_dims, "cos has more dims than the rotated tensor", torch.bfloat16),
    "one angle": (_one_angle, "cos does not have 64 entries in its last dim", torch.bfloat16),
    "mixed dtypes": (lambda x, a: half(x, a.float()), "the rotation mixes dtypes: x bfloat16 (", torch.bfloat16),
    "tokens between heads": (_twice, "32] is not one of the op's", torch.bfloat16),
    "interleaved tokens between heads": (_twice_interleaved, "interleave_rope: layout x [2, 2, 5, 3, 64]",
                                         torch.bfloat16),
    "interleaved fp32": (slices, "'x' must be of dtype float16 or bfloat16", torch.float32),
    "interleaved 32": (lambda x, a: slices(x[..., :32], a[..., :16]), "'x' must be of shape [B, N, S, 64]",
                       torch.bfloat16),
}


@pytest.mark.parametrize("name", ROTARY_REFUSALS)
def test_rotary_refuses(name: str) -> None:
    fn, reason, dtype = ROTARY_REFUSALS[name]
    before = trace(fn, _x(dtype), _angles(dtype))
    after, log = before.fused(ROTARY)
    assert not {"rotary_mul", "interleave_rope"} & set(log.counts())
    assert any(reason in f"{m.rule}: {m.reason}" for m in log.misses), log.misses
    for found, plain in zip(after.run(), before.run(), strict=True):
        torch.testing.assert_close(found.double(), plain.double(), rtol=2 * BF16, atol=4 * BF16)


def test_a_rotation_that_ends_otherwise_says_where() -> None:
    def fn(x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = _tables(angles)
        return (x * cos) * (_turned(x) * sin)

    _, log = trace(fn, _x(torch.bfloat16), _angles(torch.bfloat16)).fused(ROTARY)
    (miss,) = [m for m in log.misses if m.rule == "lift_rotary_half"]
    assert miss.expected.startswith("aten.add")
    assert miss.found.startswith("aten.mul bfloat16[2, 3, 5, 64]")
    assert miss.matched == 5


def test_a_refusal_names_the_table() -> None:
    _, log = trace(_one_angle, _x(torch.bfloat16), _angles(torch.bfloat16)).fused(ROTARY)
    (miss,) = [m for m in log.misses if "entries" in m.reason]
    assert miss.node != miss.anchor
    assert miss.found.endswith("[2, 1, 5, 1]")


def test_another_permutation_of_the_pairs_stays_in_front() -> None:
    before = trace(_other_permutation, _x(torch.bfloat16), _angles(torch.bfloat16))
    after, log = before.fused(ROTARY)
    assert log.counts() == {"lift_rotary_half": 1, "rotary_mul": 1}
    assert any("not its pairs apart" in m.reason for m in log.misses)
    torch.testing.assert_close(after.run()[0], before.run()[0], rtol=2 * BF16, atol=4 * BF16)


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float()
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _over(dim: int, gamma: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(x: Tensor, g: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + 1e-6)).to(x.dtype)
        return gamma(g) * normed  # type: ignore[no-any-return, operator]

    return fn


def _normed(wide: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, g: (wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORM_REFUSALS = {
    "integers": (_normed(lambda x: (8 * x).to(torch.int32).float()),
                 "the norm mixes dtypes: input torch.float32 (a cast of aten._to_copy (a cast to int"),
    "fp32 from elsewhere": (_normed(lambda x: x.float().clamp(-1.0, 1.0)), "dtypes: input torch.float32 (aten.clamp"),
    "mean over tokens": (_over(0, lambda g: g), "the mean is over dim 0, not over the last one"),
    "gamma of one entry": (_over(-1, lambda g: g[:1]), "gamma has shape (1,), not [64]"),
    "gamma per token": (_over(-1, lambda g: g[:7, None]), "gamma has shape (7, 1), not [64]"),
}


@pytest.mark.parametrize("name", NORM_REFUSALS)
def test_lift_rms_norm_refuses(name: str) -> None:
    fn, reason = NORM_REFUSALS[name]
    before = trace(fn, _x(torch.bfloat16, 7, 64), 1 + 0.2 * _x(torch.bfloat16, 64))
    after, log = before.fused(rms_norm.RULES)
    assert any(reason in m.reason for m in log.misses), (log.hits, log.misses)
    torch.testing.assert_close(after.run()[0], before.run()[0], rtol=BF16, atol=1e-3)


SUMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "residual": (lambda a, b, g: (_norm(a + b, g), a + b), ""),
    "norm alone": (lambda a, b, g: (_norm(a + b, g),), ""),
    "three terms": (lambda a, b, g: (_norm((a + b) + a, g),), ""),
    "constant": (lambda a, b, g: (_norm(a + 1.0, g),), "the sum adds the constant 1.0"),
    "broadcast": (lambda a, b, g: (_norm(a + b[0], g),), "the sum broadcasts [64] to [7, 64]"),
    "mixed dtypes": (lambda a, b, g: (_norm(a + b.float(), g.float()),), "the sum mixes torch.bfloat16"),
}


@pytest.mark.parametrize("name", SUMS)
def test_add_rms_norm(name: str) -> None:
    fn, reason = SUMS[name]
    a, b, gamma = _x(torch.bfloat16, 7, 64), _x(torch.bfloat16, 7, 64).flip(0), 1 + 0.2 * _x(torch.bfloat16, 64)
    before = trace(fn, a, b, gamma)
    after, log = before.fused(NORM)
    assert log.counts() == {"lift_rms_norm": 1} | ({} if reason else {"add_rms_norm": 1})
    assert not reason or any(reason in m.reason for m in log.misses), log.misses
    for found, plain in zip(after.run(), before.run(), strict=True):
        assert found.dtype == plain.dtype
        torch.testing.assert_close(found, plain, rtol=BF16, atol=1e-3)
    if name == "residual":
        assert torch.equal(after.run()[1], a + b)


def _product(a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    x = a * b
    return _norm(x, g), x


NO_SUMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], str]] = {
    "difference": (lambda a, b, g: (_norm(a - b, g), a + b), "found aten.sub bfloat16[7, 64]"),
    "product that goes on": (_product, "found aten.mul bfloat16[7, 64]"),
    "rounded sum": (lambda a, b, g: (_norm((a.float() + b.float()).bfloat16(), g),),
                    "found aten._to_copy (a cast to bfloat16[7, 64])"),
    "gated": (lambda a, b, g: (_norm(a.relu() * b.sigmoid(), g),), ""),
    "scaled": (lambda a, b, g: (_norm(a * 2.0, g), a), ""),
    "per token": (lambda a, b, g: (_norm(a * b[:, :1], g), a), ""),
    "cast": (lambda a, b, g: (_norm(a.float().bfloat16().relu(), g), a), ""),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_stands_for_a_residual_sum_is_told_and_nothing_else(name: str) -> None:
    fn, reason = NO_SUMS[name]
    before = trace(fn, _x(torch.bfloat16, 7, 64), _x(torch.bfloat16, 7, 64).flip(0), _x(torch.bfloat16, 64))
    _, log = before.fused(NORM)
    assert log.counts() == {"lift_rms_norm": 1}
    found = [m.reason for m in log.misses if m.rule == "add_rms_norm"]
    assert [r.startswith("the norm reads no sum") and reason in r for r in found] == [True] * bool(reason), found


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * 0.125 + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


ATTENTION: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], str]] = {
    "masked": (_attend, ""),
    "no mask": (lambda q, k, v, m: _attend(q, k, v, m * 0)[:, :, :2], ""),
    "fp32 weights": (lambda q, k, v, m: (q @ k.mT * 0.125 + m).float().softmax(-1) @ v.float(), "mixes dtypes"),
    "bool mask": (lambda q, k, v, m: _attend(q, k, v, m < 0), "a mask of bool is added to the scores"),
    "mask of three dims": (lambda q, k, v, m: _attend(q, k, v, m[0]), "is not a mask over [B, N, S, T]"),
    "values shared by heads": (lambda q, k, v, m: _attend(q, k, v[:, :1], m), "are not [B, N, S, D]"),
    "mask of more rows": (lambda q, k, v, m: _attend(q[:, :, :1], k, v, m), "does not broadcast to the scores"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    fn, reason = ATTENTION[name]
    q, k, v = _x(torch.bfloat16), _x(torch.bfloat16).flip(2), _x(torch.bfloat16).flip(1)
    mask = torch.full((S, S), -1e9).triu(1).bfloat16().expand(B, 1, S, S).contiguous()
    before: Traced = trace(fn, q, k, v, mask)
    after, log = before.fused((attention.RULE,))
    assert log.counts() == ({} if reason else {"lift_attention": 1})
    assert not reason or any(reason in m.reason for m in log.misses), log.misses
    exact = fn(q.double(), k.double(), v.double(), mask.double()) if not reason else before.run()[0]
    torch.testing.assert_close(after.run()[0].double(), exact.double(), rtol=2 * BF16, atol=BF16)


