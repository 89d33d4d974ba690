"""`cannopy compile --offline`: a model without weights compiles to the graph of the one with weights."""

from __future__ import annotations

import json

import pytest

from cannopy import cli


@pytest.mark.slow
def test_compile_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "deepseek-v3.2", "--offline", "--no-cache", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    fused = {rule: count for rule, count in report["fusions"].items() if not rule.startswith("lift_")}
    assert fused == {
        "sparse_flash_attention": 4,
        "mla_prolog": 4,
        "moe_gating_top_k": 3,
        "moe_experts": 3,
        "swiglu": 4,
        "add_rms_norm": 8,
        "rms_norm": 1,
        "rotary_mul": 8,
    }
    assert report["cache_copies"] == 0
    kernels = ("MlaPrologV3", "LightningIndexer", "SparseFlashAttention", "GroupedMatmul")
    assert [report["kernels"][kernel] for kernel in kernels] == [4, 4, 4, 6]


def test_a_factory_makes_its_own_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "model.py:make", "--offline"]) == cli.EXIT_FAILED
    assert "torch.device('meta')" in capsys.readouterr().err
