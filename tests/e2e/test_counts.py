"""Fusion counts of stock models: so many layers, so many matches, in both phases where they differ."""

from __future__ import annotations

import pytest

from cannopy.backend.host.activate import activate
from tools.forms_probe import MODELS, row

DENSE = ("llama", "qwen2", "qwen3")
"""Nothing of them depends on the phase but attention, which has no kernel yet."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), [(n, p) for n in MODELS for p in ("prefill", "decode")
                                             if p == "decode" or n not in DENSE])
def test_counts_follow_the_layers(name: str, phase: str) -> None:
    activate()
    layers = 2 if phase == "prefill" else 3
    found = row(MODELS[name], phase, layers, run=False)  # type: ignore[arg-type]
    assert found["found"] == found["expected"]


def test_expected_counts_grow_with_the_layers() -> None:
    counts = MODELS["deepseek_v32"].counts(61)
    assert counts["mla_prolog"] == counts["sparse_flash_attention"] == counts["swiglu"] == 61
    assert counts["moe_experts"] == counts["moe_gating_top_k"] == 60
    assert counts["add_rms_norm"] == 122
    assert all(sum(m.counts(6).values()) > sum(m.counts(5).values()) for m in MODELS.values())
