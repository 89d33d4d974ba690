"""Bytes and MACs of the kernels: published counts, limits of the formulas, contracts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exact import indexer, ratios, traffic
from cannopy.fusion_rules.contracts import contract_names, load_contract
from cannopy.stream_scheduler.cost import (
    Kernel,
    Role,
    SizeError,
    UnknownKernelError,
    active_experts,
    kernel,
    kernel_names,
)

ALL = [kernel(name) for name in kernel_names()]


@pytest.mark.parametrize("exact", [*traffic(), *indexer(), *ratios()], ids=lambda e: e.name)
def test_published_counts_come_out_exactly(exact) -> None:
    assert exact.equal, f"published {exact.published}, computed {exact.computed}"


def test_all_of_the_traffic_table_is_there() -> None:
    assert len(traffic()) == 18


def some_sizes(k: Kernel) -> dict[str, float]:
    """Plausible sizes for every parameter without a default."""
    plausible = {"context": 1024.0, "hidden": 7168.0, "q_rank": 1536.0, "experts": 256.0, "bytes_per_rank": 65536.0,
                 "elements": 4096.0, "width": 512.0, "k": 512.0, "n": 512.0, "kv_heads": 2.0}
    return {s.name: plausible.get(s.name, 8.0) for s in k.sizes if s.default is None}


GROWING = [(k, s.name) for k in ALL for s in k.sizes if s.name not in ("experts", "ranks", "ops")]


@pytest.mark.parametrize(("k", "size"), GROWING, ids=[f"{k.name}-{size}" for k, size in GROWING])
def test_bytes_and_macs_never_fall_when_a_size_grows(k: Kernel, size: str) -> None:
    base = {s.name: s.default for s in k.sizes if s.default is not None} | some_sizes(k)
    contained = {part: base[part] / 2 for part, whole in k.at_most if whole == size}
    base |= contained
    small, large = k.work(**base | {size: base[size] / 2}), k.work(**base)
    assert large.bytes >= small.bytes
    assert large.macs >= small.macs
    if not (k.name == "sparse_flash_attention" and size == "selected"):  # more than the context are never read
        assert large.bytes + large.macs + large.vector_ops > small.bytes + small.macs + small.vector_ops


@pytest.mark.parametrize("k", ALL, ids=lambda k: k.name)
def test_every_kernel_says_what_it_is(k: Kernel) -> None:
    assert k.source
    assert k.summary
    assert all(s.meaning for s in k.sizes)
    work = k.work(**some_sizes(k))
    assert work.bytes == pytest.approx(work.weight_bytes + work.activation_bytes + work.cache_bytes)
    assert (work.macs > 0) == k.cube
    if k.contract is not None:
        assert k.contract in contract_names()


def test_every_contract_that_a_device_kernel_has_is_priced() -> None:
    priced = {k.contract for k in ALL}
    by_link = {"npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"}  # the law of exchanges prices them
    by_bytes = {"npu_moe_re_routing", "npu_attention_update"}
    assert {load_contract(name).op for name in contract_names()} - priced == {"npu_prefetch", *by_link, *by_bytes}


def test_matmul_by_hand() -> None:
    work = kernel("w4a8_matmul").work(m=3, k=10, n=20)
    assert (work.macs, work.weight_bytes, work.activation_bytes) == (600, 100, 30 + 120)
    assert work.flops == 1200


def test_prolog_of_longcat_flash_and_deepseek() -> None:
    longcat = kernel("mla_prolog").work(tokens=1, hidden=6144, q_rank=1536, heads=64)
    assert longcat.macs / 1e6 == pytest.approx(36.0, abs=0.05)
    assert longcat.weight_bytes / 1e6 == pytest.approx(72.1, abs=0.05)
    deepseek = kernel("mla_prolog").work(tokens=1, hidden=7168, q_rank=1536, heads=128)
    assert deepseek.macs / 1e6 == pytest.approx(61.3, abs=0.05)


def test_prefetched_weights_of_longcat_are_those_of_its_prolog() -> None:
    """q_a, q_b and kv_a take 18, 36 and 6.75 MiB in BF16; W_UK is what is left."""
    work = kernel("mla_prolog").work(tokens=1, hidden=6144, q_rank=1536, heads=64)
    assert work.weight_bytes == (18 + 36 + 6.75) * 2**20 + 64 * 128 * 512 * 2


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 12))
def test_active_experts_by_simulation_of_its_limits(local: int, tokens: int, top_k: int) -> None:
    total = local * 4 + top_k
    active = active_experts(float(local), float(total), float(top_k), float(tokens))
    assert 0 < active <= local
    assert active <= tokens * top_k * local / total + 1e-9
    assert active_experts(float(local), float(total), float(top_k), 1.0) == pytest.approx(top_k * local / total)
    assert active_experts(float(local), float(total), float(top_k), 1e6) == pytest.approx(local)


def test_active_experts_in_symbols_is_the_number() -> None:
    k = kernel("grouped_matmul_int8")
    work = k.work(tokens=16, top_k=8, experts=256, local_experts=32, k=1, n=1)
    expected = 32 * (1 - (1 - 8 / 256) ** 16)
    assert work.read[Role.WEIGHTS] == pytest.approx(expected)
    assert work.macs == 16 * 8 * 32 / 256


def test_selected_tokens_are_no_more_than_there_are() -> None:
    short = kernel("sparse_flash_attention").work(batch=1, q_tokens=1, context=100, heads=8)
    assert short.read[Role.CACHE] == 100 * 576 * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"m": 1, "k": 1}, "needs n: m k n"),
        ({"m": 1, "k": 1, "n": 1, "kk": 2}, "no size 'kk'; did you mean 'k'"),
        ({"m": 0, "k": 1, "n": 1}, "m must be positive"),
        ({"m": math.nan, "k": 1, "n": 1}, "m must be positive"),
        ({"m": math.inf, "k": 1, "n": 1}, "m must be positive and finite"),
        ({"m": 1e200, "k": 1e200, "n": 1}, "beyond all numbers"),
    ],
)
def test_wrong_sizes_are_named(sizes: dict[str, float], message: str) -> None:
    with pytest.raises(SizeError, match=message):
        kernel("bf16_matmul").work(**sizes)


def test_an_unknown_kernel_gets_the_nearest() -> None:
    with pytest.raises(UnknownKernelError, match="did you mean 'int8_matmul'"):
        kernel("int8_matmull")


@pytest.mark.parametrize("k", [k for k in ALL if k.at_most], ids=lambda k: k.name)
def test_a_part_is_not_larger_than_the_whole(k: Kernel) -> None:
    base = some_sizes(k)
    for part, whole in k.at_most:
        k.work(**base | {part: base[whole]})
        with pytest.raises(SizeError, match=f"{part}=.* is more than {whole}="):
            k.work(**base | {part: base[whole] + 1})


@pytest.mark.parametrize("k", [k for k in ALL if any(s.name == "ranks" for s in k.sizes)], ids=lambda k: k.name)
def test_a_group_has_a_die(k: Kernel) -> None:
    assert k.work(**some_sizes(k) | {"ranks": 1}).link_bytes == 0
    with pytest.raises(SizeError, match="ranks is at least 1"):
        k.work(**some_sizes(k) | {"ranks": 0.5})


def test_every_kernel_that_chooses_k_of_n_checks_it() -> None:
    for k in ALL:
        names = {s.name for s in k.sizes}
        for pair in (("top_k", "experts"), ("local_experts", "experts")):
            assert pair in k.at_most or not names >= set(pair), k.name
