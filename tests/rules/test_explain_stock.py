"""`explain` on stock models of transformers with one thing changed: that thing, its line and the cure."""

from __future__ import annotations

import json

import pytest
import torch

from cannopy.explain import Explanation, explain
from cannopy.explain_view import lines
from cannopy.frontend.generation import GenerationCase
from tests.models.pairs import PAIRS
from tests.rules.stock_changes import CHANGES, LAYERS, deepseek, qwen


@pytest.mark.parametrize("change", CHANGES)
def test_the_change_is_named(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = CHANGES[change]
    model, args, kwargs = make(monkeypatch)
    found = explain(model, "forward", args, kwargs)
    data = json.loads(json.dumps(found.to_dict()))
    misses = [m for m in data["misses"] if m["rule"] == said.rule and m["kind"] == said.kind]
    assert misses, [(m["rule"], m["kind"], m["reason"]) for m in data["misses"]]
    miss = misses[0]
    assert (len(misses), miss["layers"]) == (1, list(range(LAYERS))), misses
    assert 0 < miss["matched"] <= miss["total"]
    assert miss["node"]
    for field, part in {"expected": said.expected, "found": said.found, "source_text": said.line,
                        "remedy": said.remedy, "clause": said.clause}.items():
        assert part in miss[field], (field, miss)
        assert miss[field] or field == "clause"
    assert ".py:" in miss["source"]
    _text_says_the_same(found, miss)


def _text_says_the_same(found: Explanation, miss: dict[str, str]) -> None:
    text = "\n".join(line for line, _ in lines(found.of_rule(miss["rule"])))
    matched = f"{miss['matched']} of {miss['total']} operations" if miss["matched"] < miss["total"] else (
        f"all {miss['total']} operations")
    for part in ("layers 0-1", matched, miss["node"], miss["expected"], miss["found"], miss["source"], miss["remedy"]):
        assert part in text
    assert text.count(miss["remedy"]) == 1, "once for a kind of layers, not once for each"


def test_nothing_is_refused_of_the_stock_models() -> None:
    """Without a cache, transformers looks for packed sequences in the positions: a mask that is not proven."""
    for (model, args, kwargs), unproven in ((qwen(), ["fused_infer_attention"]),
                                            (deepseek(first_k_dense_replace=1), [])):
        found = explain(model, "forward", args, kwargs)
        assert [r.rule for r in found.refused] == unproven
        assert all("not provably causal" in r.reason for r in found.refused)
        _nodes_are_followed(found)


@pytest.mark.parametrize(("name", "missed"), [("deepseek-r1", False), ("deepseek-v3.2", True)])
def test_only_a_model_with_an_indexer_misses_sparse_attention(name: str, missed: bool) -> None:
    """Its latents are of 32 values, so no fused attention takes either model."""
    case = GenerationCase(PAIRS[name]().stock, 1, 12, 32)
    args, kwargs = case.inputs("decode")
    refused = {r.rule for r in explain(case.model, "forward", args, kwargs).refused}
    assert ("sparse_flash_attention" in refused) == missed
    assert missed or "fused_infer_attention" in refused


def _nodes_are_followed(found: Explanation) -> None:
    """A kernel has the lines that became it; a captured node ends in a kernel."""
    norms = found.at_node("npu_add_rms_norm")
    assert norms.applied
    assert {a.rule for a in norms.applied} >= {"add_rms_norm", "lift_rms_norm"}
    assert all("modeling_" in line for a in norms.applied for line in a.lines)
    rsqrt = next(name for name, (what, *_) in found.lineage.captured.items() if what.startswith("aten.rsqrt"))
    fate = found.lineage.fate(rsqrt)
    assert "torch.rsqrt(variance + self.variance_epsilon)" in fate.source_text
    assert fate.kernels
    kernel = found.lineage.fate(fate.kernels[0])
    assert any("made by" in step for step in kernel.steps)


@pytest.mark.parametrize(("dtype", "clause"), [
    (torch.float32, "npu_lightning_indexer.query-dtype"),
    pytest.param(torch.float16, "npu_mla_prolog_v3.token-x-dtype", marks=pytest.mark.slow),
])
def test_other_dtypes_with_grouped_experts(dtype: torch.dtype, clause: str) -> None:
    model, args, kwargs = deepseek(dtype=dtype, first_k_dense_replace=1)
    found = explain(model, "forward", args, kwargs)
    assert any(r.clause == clause and r.layers == (0, 1) for r in found.refused)


def test_a_required_rule_names_what_stands_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import cannopy
    from cannopy.errors import CannopyError

    make, _ = CHANGES["reader"]
    model, args, kwargs = make(monkeypatch)
    with pytest.raises(CannopyError, match="swiglu"):
        cannopy.compile(model, example_inputs=args, example_kwargs=kwargs,
                        options=cannopy.Options(fusions={"swiglu": "require"}))
