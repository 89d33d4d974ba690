"""Layouts that are proposed for a number of dies, and the published ones in examples/parallel."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from cannopy import cli
from cannopy.cli import auto_layout
from cannopy.frontend import sources
from cannopy.fx_passes.parallel import Layout
from cannopy.models.deepseek import DeepseekConfig
from cannopy.models.longcat import LongcatConfig
from cannopy.options import sizes_of
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network import layouts
from cannopy.stream_scheduler.network.model import load_model
from cannopy.stream_scheduler.network.published import described
from cannopy.stream_scheduler.network.report import estimate_step
from cannopy.stream_scheduler.network.setting import Load, Quantisation, SettingError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "parallel"
A3, BF16 = load_hardware("atlas-a3"), Quantisation()


@pytest.mark.parametrize(("model", "groups", "sequences", "context"), [
    ("deepseek-v3.2", {"o_proj_tp": 8, "dense_tp": 4, "embed_tp": 16, "lm_head_tp": 16}, 2, 65536),
    ("deepseek-r1", {"dense_tp": 4, "lm_head_tp": 16}, 2, 32768),
    ("longcat-flash", {"o_proj_tp": 8, "dense_tp": 8, "lm_head_tp": 16}, 4, 4608),
    ("kimi-k2", {}, 1, 4096),
])
def test_published_layouts(model: str, groups: dict[str, int], sequences: int, context: int,
                           capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / f"{model}.yaml"
    parallel = sizes_of(file)
    assert parallel is not None
    assert (parallel.dies, parallel.ep, parallel.dp) == (128, 128, 128)
    found = {k: getattr(parallel, k) for k in ("o_proj_tp", "dense_tp", "embed_tp", "lm_head_tp", "attn_tp", "moe_tp")}
    assert {k: n for k, n in found.items() if n > 1} == groups
    Layout(parallel, 127)
    assert cli.main(["estimate", model, "--parallel", str(file), "--batch-per-die", str(sequences), "--context",
                     str(context), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory"]["fits"]
    assert report["lower_bound_us"] <= report["step_us"]
    labels = {row["label"] for row in report["kernels"]}
    assert {"dispatch", "combine"} <= labels
    assert ("o_proj_all_to_all" in labels) == ("o_proj_tp" in groups)


def test_the_fastest_that_fits_comes_first() -> None:
    model, load = load_model("deepseek-r1"), Load("decode", 4, 4096)
    small = dataclasses.replace(model, layers=6)
    found = layouts.propose(small, 16, load, BF16, A3)
    assert [p.us for p in found.best] == sorted(p.us for p in found.best)
    assert all(p.memory.fits for p in found.best)
    assert found.legal > 300
    for text in ("ep=16,dp=16", "ep=4,dp=16,o_proj_tp=2", "ep=8,dp=16,dense_tp=8,lm_head_tp=4", "ep=16,dp=4,attn_tp=4"):
        other = sizes_of(text)
        assert other is not None
        own = dataclasses.replace(load, batch=load.batch * other.attn_tp)
        exact = estimate_step(small, own, layouts.Parallel(**dataclasses.asdict(other)), BF16, A3).us
        assert found.best[0].us <= exact, text
        assert layouts._Times(small, BF16, A3).of(layouts.Parallel(**dataclasses.asdict(other)), own) == pytest.approx(
            exact, rel=0.03), text


def test_reasons() -> None:
    model = load_model("deepseek-r1")
    with pytest.raises(SettingError, match=r"no layout of 8 dies .* than the 68.7 GB of a die; the smallest takes"):
        layouts.propose(model, 8, Load("decode", 4, 4096), BF16, A3)
    found = layouts.propose(dataclasses.replace(model, layers=4), 24, Load("decode", 1, 4096), BF16, A3)
    assert any("256 experts cannot be divided by ep=24" in reason for reason in found.dropped)
    assert all(p.parallel.ep <= 8 for p in found.best)
    dense = layouts.propose(load_model("qwen2.5-7b"), 2, Load("decode", 1, 4096), BF16, A3)
    assert all(p.parallel.ep == 1 for p in dense.best)


@pytest.mark.parametrize(("name", "config"), [
    ("deepseek-v3.2", DeepseekConfig(index_topk=2048)), ("deepseek-r1", DeepseekConfig()),
    ("longcat-flash", LongcatConfig()),
])
def test_sizes_of_a_configuration(name: str, config: DeepseekConfig | LongcatConfig) -> None:
    known, found = load_model(name), described(dataclasses.asdict(config), name)
    rows = {"cache_row_int8": known.attention.cache_row_int8}
    found = dataclasses.replace(found, title=known.title, quantised=known.quantised, draft=known.draft,
                                attention=dataclasses.replace(found.attention, **rows))
    assert found == known


def test_dies_and_auto_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "deepseek-r1", "--parallel", "auto"]) != 0
    assert "--dies N" in capsys.readouterr().err
    assert cli.main(["compile", "deepseek-r1", "--dies", "8", "--offline"]) != 0
    assert "--dies N" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "size", "form"), [
    ("deepseek-r1", "tiny", "serving"), ("longcat-flash", "tiny", "stock"), ("qwen3-moe", "tiny", "serving"),
    ("kimi-k2", "full", "serving"),
])
def test_layouts_of_what_is_compiled(name: str, size: str, form: Literal["stock", "serving"]) -> None:
    loaded = sources.load(name, size=size, form=form, weights=False)
    dies = 8 if size == "tiny" else 64
    args = argparse.Namespace(model=name, size=size, phase="decode", batch=1, target="atlas-a3", dies=dies)
    best = auto_layout.for_graph(args, loaded).best[0]
    assert best.parallel.dies == dies
    assert best.memory.fits
    if size == "full":  # 2 TB of weights
        assert best.parallel.ep == 64


def test_dies_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = sources.load("deepseek-r1", size="tiny", form="serving", weights=False)
    args = argparse.Namespace(model="deepseek-r1", size="tiny", phase="both", batch=1, target="atlas-a3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert auto_layout.of_world(args, loaded).best[0].parallel.dies == 4
