"""`cannopy run` end to end: a checkpoint folder and a factory, through torchair and the host engine."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from cannopy import cli
from cannopy.models import zoo
from cannopy.models.lively import lively_

LAYERS = 2
"""One dense and one MoE layer."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and safetensors of a DeepSeek-V3.2 of legal sizes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = DeepseekV32Config(**{**zoo.preset("deepseek-v3.2", "tiny").config, "num_hidden_layers": LAYERS})
    model = DeepseekV32ForCausalLM._from_config(config, dtype=torch.bfloat16)
    lively_(model, 3).save_pretrained(folder)
    return folder


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["run", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def folder_run(checkpoint, tmp_path_factory) -> tuple[int, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("out")
    arguments = ["--prompt-tokens", "80", "--max-cache-len", "128", "--steps", "2", "--out", str(out)]
    code = cli.main(["run", str(checkpoint), *arguments])
    return code, json.loads((out / "report.json").read_text()), (out / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_folder_fuses_every_layer(folder_run, phase):
    _, report, _ = folder_run
    ge_ops = report["phases"][phase]["ge_ops"]
    per_layer = {name: ge_ops.get(name) for name in ("MlaPrologV3", "LightningIndexer", "SparseFlashAttention")}
    assert per_layer == dict.fromkeys(per_layer, LAYERS)
    assert ge_ops.get("MoeGatingTopK") == LAYERS - 1
    assert report["phases"][phase]["cache_copies"] == 0


@pytest.mark.slow
def test_folder_holds_parity(folder_run):
    code, report, _ = folder_run
    assert report["parity"]["failures"] == []
    assert (code, report["passed"]) == (0, True)
    assert [part["compiled"]["tokens"] for part in report["parity"]["errors"]] == [80, 2]
    made = {(p["phase"], p["kind"]): p["tokens"] for p in report["parity"]["picks"]}
    assert made == {
        ("prefill", "keys"): 80 * LAYERS,
        ("prefill", "groups"): 80,
        ("prefill", "experts"): 80,
        ("decode", "keys"): 2 * LAYERS,
        ("decode", "groups"): 2,
        ("decode", "experts"): 2,
    }
    assert report["notes"] == []
    assert all(len(row) == 3 for row in report["tokens"])


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "data") and v]


@pytest.mark.slow
def test_page_is_self_contained_and_tells_it_all(folder_run):
    _, report, page = folder_run
    links = _Links()
    links.feed(page)
    assert links.found == [f"a href=timeline-{phase}.html" for phase in ("prefill", "decode")]
    assert not re.search(r"url\(|@import|https?://", page)
    assert "$" not in page.replace("$schema", "")
    for text in ("parity holds", "MlaPrologV3", "mla_prolog", "prefers-color-scheme: dark", "compile prefill"):
        assert text in page
    for part in report["parity"]["errors"]:
        assert f"{part['compiled']['median']:.2e}" in page


@pytest.mark.slow
def test_factory(checkpoint, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from transformers import DeepseekV32ForCausalLM, StaticCache\n"
        "def make(dtype=None):\n"
        f"    model = DeepseekV32ForCausalLM.from_pretrained({str(checkpoint)!r}, dtype=torch.bfloat16).eval()\n"
        "    cache = StaticCache(config=model.config, max_cache_len=128)\n"
        "    ids = torch.arange(70).view(1, 70)\n"
        "    return model, 'forward', ((ids,), {'cache': cache, 'use_cache': True})\n"
    )
    code, report = _run(capsys, f"{file}:make", "--phase", "prefill")
    assert (code, report["parity"]["failures"]) == (0, [])
    assert report["phases"]["prefill"]["ge_ops"]["MlaPrologV3"] == LAYERS
    assert [part["compiled"]["tokens"] for part in report["parity"]["errors"]] == [70]


def test_a_wrong_result_ends_in_exit_code_1(tmp_path, capsys, monkeypatch):
    """The compiled call doubles its result on the way out."""
    import cannopy

    file = tmp_path / "small.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(64, 32).bfloat16(), 'forward', (torch.randn(9, 64).bfloat16(),)\n"
    )
    code, report = _run(capsys, f"{file}:make")
    assert (code, report["passed"]) == (0, True)

    real = cannopy.compile

    def doubling(*args: Any, **kwargs: Any) -> Any:
        compiled = real(*args, **kwargs)

        class Doubled:
            report = compiled.report
            timeline = None
            of_rank = compiled.of_rank

            def __call__(self, *a: Any, **k: Any) -> Any:
                return 2 * compiled(*a, **k)

        return Doubled()

    monkeypatch.setattr(cannopy, "compile", doubling)
    code, report = _run(capsys, f"{file}:make")
    assert (code, report["passed"]) == (1, False)
    assert "median error 1.0" in report["parity"]["failures"][0]
