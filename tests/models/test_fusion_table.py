"""Fusions by model, form, phase and rule: as often as the model has the math, and as docs/models.md says."""

from __future__ import annotations

import pytest

from cannopy.frontend.generation import Phase
from tools import fusion_table
from tools.fusion_table import MODELS, PAGE, Form, Row, row

MOST = 1.15
"""Kernels of a decode layer over those of the model written by hand."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "form", "phase"), fusion_table.keys())
def test_each_rule_applies_where_its_math_is(model: str, form: Form, phase: Phase) -> None:
    assert row(model, form, phase).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("form", fusion_table.FORMS)
@pytest.mark.parametrize("model", [m for m, family in MODELS.items() if family.by_hand])
def test_a_decode_layer_has_hardly_more_kernels_than_by_hand(model: str, form: Form) -> None:
    kernels = sum(row(model, form, "decode").kernels.values())
    by_hand = sum(MODELS[model].by_hand.values())
    assert kernels <= MOST * by_hand


@pytest.mark.slow
def test_the_page_is_what_is_found() -> None:
    assert PAGE.read_text(encoding="utf-8") == fusion_table.page(list(fusion_table.rows())), "make docs"


def test_expectations_follow_the_layers() -> None:
    r1 = MODELS["deepseek-r1"].expected("serving", "decode", 61)
    assert r1 == {"mla_prolog": 61, "fused_infer_attention": 61, "add_rms_norm": 122, "rms_norm": 1,
                  "moe_gating_top_k": 60, "moe_experts": 60, "swiglu": 61}
    longcat = MODELS["longcat-flash"].expected("serving", "prefill", 28)
    assert longcat["moe_finalize_add"] == 28
    assert (longcat["lift_norm_scale"], longcat["rms_norm"], longcat["interleave_rope"]) == (112, 57, 56)
    assert [sum(f.by_hand.values()) for f in MODELS.values() if f.by_hand] == [29, 18, 18, 27]


def test_a_row_says_what_is_wrong() -> None:
    expected, counted = {"swiglu": 2, "rms_norm": 1}, {"swiglu": 1, "moe_experts": 1, "rms_norm": 1}
    found = Row("m", "stock", "decode", expected, counted, {})
    assert found.wrong == ["m, stock, decode: swiglu 1 of 2", "m, stock, decode: moe_experts 1 of 0"]
    text = fusion_table.page([found])
    assert "| stock | decode | 1 / 2 | 1 / 1 | 1 / 0 |" in text
