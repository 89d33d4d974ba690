"""What experts over dies ask of a product, with numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cannopy.fusion_rules.parallel.legality import (
    MIB,
    MOST_CHUNKS,
    MOST_ROWS,
    ROUTED_BYTES,
    Traffic,
    buffer_mb,
    chunks,
    dispatch_limits,
    routed_bytes,
    rows_per_die,
)
from cannopy.fx_passes.parallel import ParallelError

R1 = Traffic("atlas-a3", ep=128, tokens=64, hidden=7168, top_k=8, experts=256, choices=256)
LONGCAT = Traffic("atlas-a3", ep=128, tokens=32, hidden=6144, top_k=12, experts=512, choices=768)


def test_published_layouts_are_legal() -> None:
    for published in (R1, LONGCAT, replace(R1, experts=384, choices=384), replace(R1, product="atlas-a2", ep=16)):
        assert dispatch_limits(published) == []


def test_buffers_by_the_documented_formula() -> None:
    # align512(align32(14336) + 64) = align512(14400) = 14848; 2 · (2 · 64 · 128 · 14848 + 9 · 64 · 14336) bytes
    assert 2 * (2 * 64 * 128 * 14848 + 9 * 64 * 14336) == 503_054_336
    assert buffer_mb(R1) == -(-503_054_336 // MIB) == 480
    # 2 · (64 · 16 · min(16, 8) · 14336 + 2 MB)
    assert buffer_mb(replace(R1, product="atlas-a2", ep=16)) == 2 * (64 * 16 * 8 * 14336) // MIB + 4 == 228
    # align512(12288 + 64) = 12800; 2 · (4 · 32 · 128 · 12800 + 13 · 32 · 12288)
    assert buffer_mb(LONGCAT) == -(-2 * (4 * 32 * 128 * 12800 + 13 * 32 * 12288) // MIB) == 410


BROKEN: list[tuple[Traffic, str]] = [
    (replace(R1, tokens=513), "BS is at most 512, found BS = 513"),
    (replace(R1, top_k=17), "K is at most 16, found K = 17"),
    (replace(R1, hidden=512), "H is at least 1024, found H = 512"),
    (replace(R1, hidden=8224), "H is at most 8192, found H = 8224"),
    (replace(R1, ep=769, experts=769), "ep_world_size' must be at most 768, found 769"),
    (replace(R1, experts=1152), "at most 1024, found 1152"),
    (replace(R1, ep=96), r"moe_expert_num % \(ep_world_size - shared_expert_rank_num\) is equal to 0"),
    (replace(R1, product="atlas-a2", ep=128, tokens=257), "BS is at most 256"),
    (replace(R1, product="atlas-a2", ep=12, experts=240), "one of 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, found 12"),
    (replace(R1, product="atlas-a2", hidden=7184), "H is at most 7168"),
    (replace(R1, product="atlas-950"), "must be on atlas-a2, atlas-a3, found product atlas-950"),
    (replace(R1, itemsize=4), "dtype bfloat16 or float16, found float32"),
]


@pytest.mark.parametrize(("traffic", "words"), BROKEN)
def test_each_limit_is_told_with_its_number(traffic: Traffic, words: str) -> None:
    found = dispatch_limits(traffic)
    assert any(re.search(words, text) for text in found), found


def test_rows_and_chunks_of_a_prompt() -> None:
    assert rows_per_die(R1) == 64 * 2  # a die has two experts
    assert rows_per_die(R1, distinct=False) == 64 * 8
    assert routed_bytes(R1) == 128 * 128 * 7168 * 2
    per_token = 128 * 2 * 7168 * 2
    most = ROUTED_BYTES // per_token
    assert chunks(replace(R1, tokens=most)) == [most]
    assert most == 292
    assert chunks(replace(R1, tokens=most + 1)) == [147, 146]
    for tokens in (1, 292, 293, 1000, MOST_CHUNKS * most):
        sizes = chunks(replace(R1, tokens=tokens))
        assert sum(sizes) == tokens
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(ParallelError, match=rf"128 dies · 2 rows · 7168 .* hold {MOST_CHUNKS * most} tokens"):
        chunks(replace(R1, tokens=MOST_CHUNKS * most + 1))
    assert chunks(replace(R1, hidden=1, tokens=MOST_ROWS // 256 + 1)) == [2**15 + 1, 2**15]  # 256 rows per token
    with pytest.raises(ParallelError, match="256 experts / 96 dies is no whole number"):
        chunks(replace(R1, ep=96))
    with pytest.raises(ParallelError, match="hold 0 tokens"):
        chunks(replace(R1, hidden=2**30))
