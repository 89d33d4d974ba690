"""kv_rmsnorm_rope_cache against its formula in float64, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import assert_close, normal, round_to

EPS = 3e-3


def operands(tokens: int = 5) -> tuple[torch.Tensor, ...]:
    angle = normal(1, 1, tokens, 64, dtype=torch.float64)
    return (normal(1, 1, tokens, 576), 1 + normal(512, scale=0.1), angle.cos().bfloat16(), angle.sin().bfloat16(),
            torch.randperm(48)[:tokens], normal(3, 16, 1, 64), normal(3, 16, 1, 512))


def call(*args: torch.Tensor, **changes: object) -> tuple[torch.Tensor, ...]:
    options = {"epsilon": EPS, "cache_mode": "PA_BNSD", "is_output_kv": True} | changes
    found: tuple[torch.Tensor, ...] = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(*args, **options)
    return found


def test_both_parts_are_written_and_given_back() -> None:
    kv, gamma, cos, sin, index, k_cache, ckv_cache = args = operands()
    kept = [c.clone() for c in (k_cache, ckv_cache)]
    rope, latent, new_k, new_ckv = call(*args)
    c = kv[0, 0, :, :512].double()
    exact = c / (c.square().mean(-1, keepdim=True) + EPS).sqrt() * gamma.double()
    assert_close(latent[0, 0], exact, ulps=0.52)
    even, odd = kv[0, 0, :, 512::2].double(), kv[0, 0, :, 513::2].double()
    (c0, c1), (s0, s1) = ((t[0, 0, :, :32].double(), t[0, 0, :, 32:].double()) for t in (cos, sin))
    turned = torch.cat((even * c0 - odd * s0, odd * c1 + even * s1), -1)
    assert_close(rope[0, 0], turned, ulps=0.52, slack=1e-6)
    for new, rows, old in ((new_k, rope, kept[0]), (new_ckv, latent, kept[1])):
        flat, before = new.flatten(0, 2), old.flatten(0, 2)
        assert torch.equal(flat[index], rows[0, 0])
        others = torch.ones(48, dtype=torch.bool)
        others[index] = False
        assert torch.equal(flat[others], before[others])
    assert torch.equal(k_cache, kept[0])
    assert torch.equal(round_to(latent), latent.double())


def test_rows_are_not_given_back_unless_asked_for() -> None:
    args = operands()
    rope, latent, new_k, new_ckv = call(*args, is_output_kv=False)
    assert rope.eq(0).all()
    assert latent.eq(0).all()
    _, _, same_k, same_ckv = call(*args)
    assert torch.equal(new_k, same_k)
    assert torch.equal(new_ckv, same_ckv)


def test_a_row_outside_of_the_cache_is_refused() -> None:
    args = list(operands())
    args[4] = args[4] + 44
    with pytest.raises(ContractError, match=r"clause index-range;"):
        call(*args)
