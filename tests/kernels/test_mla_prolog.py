"""mla_prolog_v3 against the formula token by token, rounded to bf16 where the operator's type table says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import BF16, ints, normal, round_to, ulp

HEADS, NOPE, ROPE, LATENT, HIDDEN, RANK = 2, 128, 64, 512, 1024, 1536
BLOCK, BLOCKS = 16, 4


@dataclass
class Expected:
    """Results of one token, float64 holding bf16 values."""

    query: torch.Tensor
    query_rope: torch.Tensor
    norm: torch.Tensor
    ckv: torch.Tensor
    kr: torch.Tensor


def operands(*lead: int) -> dict[str, Any]:
    angle = torch.rand(*lead, ROPE // 2, dtype=torch.float64).repeat(*([1] * len(lead)), 2) * 6
    return {
        "token_x": normal(*lead, HIDDEN),
        "weight_dq": normal(HIDDEN, RANK, scale=HIDDEN**-0.5),
        "weight_uq_qr": normal(RANK, HEADS * (NOPE + ROPE), scale=RANK**-0.5),
        "weight_uk": normal(HEADS, NOPE, LATENT, scale=NOPE**-0.5),
        "weight_dkv_kr": normal(HIDDEN, LATENT + ROPE, scale=HIDDEN**-0.5),
        "rmsnorm_gamma_cq": normal(RANK),
        "rmsnorm_gamma_ckv": normal(LATENT),
        "rope_sin": angle.sin().to(BF16),
        "rope_cos": angle.cos().to(BF16),
        "rmsnorm_epsilon_cq": 0.3,
        "rmsnorm_epsilon_ckv": 0.7,
    }


def rms(row: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    return row / math.sqrt(float((row * row).sum()) / row.numel() + epsilon) * gamma.double()


def rope(row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i+1) turned by angle i; even results first, odd results after them."""
    out = torch.empty_like(row)
    half = row.numel() // 2
    for i in range(half):
        a, b = row[2 * i], row[2 * i + 1]
        out[i] = a * cos[i] - b * sin[i]
        out[half + i] = b * cos[half + i] + a * sin[half + i]
    return round_to(out)


def expected(call: dict[str, Any], token: int, alpha_q: float = 1.0, alpha_kv: float = 1.0) -> Expected:
    w = {name: value.double() for name, value in call.items() if isinstance(value, torch.Tensor)}
    x = w["token_x"].view(-1, HIDDEN)[token]
    cos, sin = w["rope_cos"].view(-1, ROPE)[token], w["rope_sin"].view(-1, ROPE)[token]
    cq = rms(round_to(x @ w["weight_dq"]), call["rmsnorm_gamma_cq"], call["rmsnorm_epsilon_cq"])
    cq = round_to(cq * alpha_q)
    q = round_to(cq @ w["weight_uq_qr"]).view(HEADS, NOPE + ROPE)
    query = torch.stack([round_to(q[h, :NOPE] @ w["weight_uk"][h]) for h in range(HEADS)])
    query_rope = torch.stack([rope(q[h, NOPE:], cos, sin) for h in range(HEADS)])
    down = round_to(x @ w["weight_dkv_kr"])
    ckv = rms(down[:LATENT], call["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])
    return Expected(query, query_rope, cq, round_to(ckv * alpha_kv), rope(down[LATENT:], cos, sin))


def assert_same(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal but for rare values that sit on a rounding boundary of an earlier step.

    At least 97 % of the numbers are bit-equal, and none is further off than one bf16 ulp of the vector's largest.
    """
    actual = actual.double()
    assert actual.shape == exact.shape
    assert float((actual == exact).double().mean()) >= 0.97
    assert float((actual - exact).abs().max()) <= float(ulp(exact.abs().max(), BF16))


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(BLOCKS, BLOCK, 1, LATENT), normal(BLOCKS, BLOCK, 1, ROPE)


def in_order(cache: torch.Tensor, mode: str) -> torch.Tensor:
    """Cache rows [BLOCKS·BLOCK, D] whatever the physical order of a block is ([D/16, BLOCK, 16] for NZ)."""
    width = cache.shape[-1]
    if "NZ" not in mode:
        return cache.reshape(-1, width)
    flat = cache.reshape(BLOCKS, -1)
    rows = torch.empty(BLOCKS, BLOCK, width, dtype=cache.dtype)
    for row in range(BLOCK):
        for d in range(width):
            rows[:, row, d] = flat[:, (d // 16) * BLOCK * 16 + row * 16 + d % 16]
    return rows.view(-1, width)


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("lead", [(3,), (2, 2)])
def test_paged_prolog(mode: str, lead: tuple[int, ...]) -> None:
    tokens = math.prod(lead)
    call = operands(*lead)
    kv_cache, kr_cache = caches()
    kv_before, kr_before = in_order(kv_cache, mode), in_order(kr_cache, mode)
    slots = torch.randperm(BLOCKS * BLOCK)[:tokens]
    query, query_rope, _, norm, _ = torch.ops.npu.npu_mla_prolog_v3(
        **call,
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        cache_index=slots.view(lead),
        cache_mode=mode,
        query_norm_flag=True,
        qc_qr_scale=1.5,
        kc_scale=0.75,
    )
    assert query.shape == (*lead, HEADS, LATENT)
    assert query_rope.shape == (*lead, HEADS, ROPE)
    kv_after, kr_after = in_order(kv_cache, mode), in_order(kr_cache, mode)
    for token in range(tokens):
        want = expected(call, token, 1.5, 0.75)
        assert_same(query.view(-1, HEADS, LATENT)[token], want.query)
        assert_same(query_rope.view(-1, HEADS, ROPE)[token], want.query_rope)
        assert_same(norm.view(-1, RANK)[token], want.norm)
        assert_same(kv_after[slots[token]], want.ckv)
        assert_same(kr_after[slots[token]], want.kr)
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(kv_after[untouched], kv_before[untouched])
    assert torch.equal(kr_after[untouched], kr_before[untouched])


def test_functional_twin_leaves_the_caches_and_returns_new_ones() -> None:
    call = operands(3)
    kv_cache, kr_cache = caches()
    options = {"cache_index": ints(40, 3, 17, dtype=torch.int64), "query_norm_flag": True}
    kv_before, kr_before = kv_cache.clone(), kr_cache.clone()
    functional = torch.ops.npu.npu_mla_prolog_v3_functional(**call, kv_cache=kv_cache, kr_cache=kr_cache, **options)
    assert torch.equal(kv_cache, kv_before)
    assert torch.equal(kr_cache, kr_before)
    inplace = torch.ops.npu.npu_mla_prolog_v3(**call, kv_cache=kv_cache, kr_cache=kr_cache, **options)
    assert not torch.equal(kv_cache, kv_before)
    for left, right in zip(functional, (*inplace, kv_cache, kr_cache), strict=True):
        assert torch.equal(left, right)


def test_whole_block_modes_write_the_same_rows() -> None:
    call = operands(21)  # two sequences of 17 and 4 tokens: blocks 2 and 0, then block 3
    paged, blocked = caches(), caches()
    for source, target in zip(paged, blocked, strict=True):
        target.copy_(source)
    slots = [*range(32, 48), 0, *range(48, 52)]
    torch.ops.npu.npu_mla_prolog_v3(
        **call, kv_cache=paged[0], kr_cache=paged[1], cache_index=torch.tensor(slots), cache_mode="PA_BSND"
    )
    torch.ops.npu.npu_mla_prolog_v3(
        **call,
        kv_cache=blocked[0],
        kr_cache=blocked[1],
        cache_index=torch.tensor([2, 0, 3]),
        actual_seq_len=ints(17, 21),
        cache_mode="PA_BLK_BSND",
    )
    assert torch.equal(paged[0], blocked[0])
    assert torch.equal(paged[1], blocked[1])


def test_plain_cache_modes_write_row_by_row() -> None:
    call = operands(4)
    kv_cache, kr_cache = normal(4, 1, LATENT), normal(4, 1, ROPE)
    torch.ops.npu.npu_mla_prolog_v3(**call, kv_cache=kv_cache, kr_cache=kr_cache, cache_mode="TND")
    for token in range(4):
        want = expected(call, token)
        assert_same(kv_cache[token, 0], want.ckv)
        assert_same(kr_cache[token, 0], want.kr)


@pytest.mark.parametrize("bad", [-1, BLOCKS * BLOCK])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(bad: int) -> None:
    call = operands(2)
    kv_cache, kr_cache = caches()
    before = kv_cache.clone()
    with pytest.raises(ContractError, match=rf"argument 'cache_index'.*found {bad} for token 1.*cache-index-range"):
        torch.ops.npu.npu_mla_prolog_v3(
            **call, kv_cache=kv_cache, kr_cache=kr_cache, cache_index=ints(0, bad, dtype=torch.int64)
        )
    assert torch.equal(kv_cache, before)


def test_quantised_weights_are_refused_on_the_host() -> None:
    call = operands(2) | {"weight_uq_qr": torch.zeros(RANK, HEADS * 192, dtype=torch.int8), "weight_quant_mode": 1}
    kv_cache, kr_cache = caches()
    with pytest.raises(ContractError, match="host-weight-quant"):
        torch.ops.npu.npu_mla_prolog_v3(
            **call, kv_cache=kv_cache, kr_cache=kr_cache, cache_index=ints(0, 1, dtype=torch.int64)
        )


def test_swapped_tables_and_absorbed_weight_matter() -> None:
    """The oracle would notice sin and cos swapped, or heads mixed up."""
    call = operands(1)
    want = expected(call, 0)
    swapped = expected(call | {"rope_sin": call["rope_cos"], "rope_cos": call["rope_sin"]}, 0)
    with pytest.raises(AssertionError):
        assert_same(want.query_rope, swapped.query_rope)
    mixed = expected(call | {"weight_uk": call["weight_uk"].flip(0)}, 0)
    with pytest.raises(AssertionError):
        assert_same(want.query, mixed.query)
