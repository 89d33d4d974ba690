"""Fusion counts of stock models: so many layers, so many matches, in both phases where they differ."""

from __future__ import annotations

import pytest

from cannopy.backend.host.activate import activate
from tools import forms
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


def test_the_table_of_versions_tells_what_is_wrong() -> None:
    row = {"about": "Three layers.", "expected": {"swiglu": 3}, "found": {"swiglu": 3}, "fused": 0.01, "plain": 0.01}
    rows = {"4": row, "5": {**row, "found": {}}, "6": {**row, "fused": 0.02},
            "7": {"about": "", "error": "ValueError: x"}}
    found = {version: {"qwen2": {"decode": r}} for version, r in rows.items()}
    assert forms.wrong(found) == [
        "transformers 5, qwen2, decode: swiglu 0 of 3",
        "transformers 6, qwen2, decode: error 2.00e-02, plain bf16 1.00e-02",
        "transformers 7, qwen2, decode: ValueError: x",
    ]
    assert "| 5 | decode | 0 / 3 | 1.0e-02 / 1.0e-02 |" in forms.page(found, "2.13.0", "2026-01-01")
