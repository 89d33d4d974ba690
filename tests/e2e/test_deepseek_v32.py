"""The main job: stock DeepSeek-V3.2, tiny, both phases, through the real torchair on the host engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cannopy import trial
from cannopy.frontend import sources
from cannopy.options import Options

pytestmark = pytest.mark.slow

LAYERS, MOE_LAYERS = 4, 3
MAX_KERNELS_PER_MOE_LAYER = 32


def _run(cache_dir: Path, seed: int, steps: int = 3, batch: int = 1) -> trial.Trial:
    loaded = sources.load("deepseek-v3.2", size="tiny", dtype=torch.bfloat16, seed=seed, batch=batch)
    return trial.run(loaded, Options(cache_dir=cache_dir), ("prefill", "decode"), steps)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def main_job(cache_dir: Path) -> trial.Trial:
    return _run(cache_dir, seed=0, steps=8)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_layer_is_fused_in_the_ge_graph(main_job: trial.Trial, phase: str) -> None:
    ops = main_job.reports[phase].ge_ops
    found = {k: ops.get(k, 0) for k in ("MlaPrologV3", "LightningIndexer", "SparseFlashAttention", "MoeGatingTopK",
                                        "MoeInitRoutingV3", "GroupedMatmul", "MoeFinalizeRoutingV2", "SwiGlu",
                                        "AddRmsNorm", "RmsNorm", "TransposeBatchMatMul")}
    assert found == {
        "MlaPrologV3": LAYERS, "LightningIndexer": LAYERS, "SparseFlashAttention": LAYERS, "MoeGatingTopK": MOE_LAYERS,
        "MoeInitRoutingV3": MOE_LAYERS, "GroupedMatmul": 2 * MOE_LAYERS, "MoeFinalizeRoutingV2": MOE_LAYERS,
        "SwiGlu": LAYERS + MOE_LAYERS, "AddRmsNorm": 2 * LAYERS, "RmsNorm": 1, "TransposeBatchMatMul": LAYERS,
    }
    assert not main_job.reports[phase].misses


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_cache_is_copied_and_no_weight_is_transposed(main_job: trial.Trial, phase: str) -> None:
    report = main_job.reports[phase]
    assert report.cache_copies == 0
    assert "TensorMove" not in report.ge_ops
    assert "Transpose" not in report.kernels


def test_a_decode_layer_has_about_as_many_kernels_as_an_expert_wrote(main_job: trial.Trial) -> None:
    report = main_job.reports["decode"]
    layers = {entry["layer"]: sum(entry["kernels"].values()) for entry in report.layers}
    assert max(layers[i] for i in range(1, LAYERS)) <= MAX_KERNELS_PER_MOE_LAYER
    assert sum(layers.values()) == sum(report.kernels.values()), "counted alike before and after torchair"


def test_parity_holds_for_several_weights(main_job: trial.Trial, cache_dir: Path) -> None:
    assert main_job.passed, main_job.parity and main_job.parity.to_dict()
    for seed in (1, 2):
        again = _run(cache_dir, seed)
        assert again.passed, again.parity and again.parity.to_dict()
        assert {r.cache["status"] for r in again.reports.values()} == {"hit"}


def test_selection_mattered(main_job: trial.Trial) -> None:
    assert main_job.parity is not None
    picks = {(p.phase, p.kind): p for p in main_job.parity.picks}
    assert set(picks) == {(phase, kind) for phase in ("prefill", "decode") for kind in ("keys", "groups", "experts")}
    assert all(p.invalid == 0 for p in picks.values())
    assert main_job.settings["prompt_tokens"] > 64, "the context is longer than index_topk"


def test_batch_of_eight(cache_dir: Path) -> None:
    assert _run(cache_dir, seed=3, steps=2, batch=8).passed
