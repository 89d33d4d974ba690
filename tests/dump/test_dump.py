"""`cannopy dump`: its files, and that they are the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy import Options, api
from cannopy.backend.host.activate import activate
from cannopy.fx_passes import dump
from tests.extension import models

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "extension" / "models.py"
EXAMPLE = ROOT / "examples" / "unit_norm.py"


def lowered(made: tuple[Any, ...], **options: Any) -> tuple[str, str]:
    """(final graph, what rules did) of compiling what a factory returned."""
    model, method, inputs = made
    program, done = api.lower(model, method, inputs, {}, Options(**options), {})
    return dump.text(program), repr((done.log.hits, done.log.misses))


def test_other_models_in_the_process_do_not_matter() -> None:
    activate()
    first = lowered(models.make())
    other = lowered(models.make(torch.float32), rules=EXAMPLE, fusions={"swiglu": False})
    assert other != first
    assert lowered(models.make()) == first
    assert lowered(models.make(torch.float32), rules=EXAMPLE, fusions={"swiglu": False}) == other


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    """Run the verb in a process of its own with another order of hashes."""
    command = [sys.executable, "-m", "cannopy", "dump", f"{MODEL}:make", "--dtype", "bf16", "--out", str(folder),
               "--pipeline", "normalise,lift,fuse{rms_norm=off},legalise", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                            env={**os.environ, "PYTHONHASHSEED": str(seed)})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Path, dict[str, Any]]:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    (second / "007-of-another-model.txt").write_text("old")
    running = [start(first, 1), start(second, 2)]
    one, two = (json.loads(process.communicate()[0]) for process in running)
    return first, one, second, two


@pytest.mark.slow
def test_files_are_the_same_in_every_run(folders: tuple[Path, dict[str, Any], Path, dict[str, Any]]) -> None:
    first, one, second, two = folders
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    plain = json.dumps(one).replace(str(first), "")
    assert plain == json.dumps(two).replace(str(second), "")


@pytest.mark.slow
def test_files(folders: tuple[Path, dict[str, Any], Path, dict[str, Any]]) -> None:
    folder, data, _, _ = folders
    names = [Path(path).name for path in data["files"]]
    graphs = [name for name in names if name[:3].isdigit() and name.endswith(".txt")]
    assert graphs[0] == "000-captured.txt"
    assert {name[4:-4] for name in graphs} >= {"captured", "normalise", "lift", "swiglu", "legalise"}
    assert [n[:-4] for n in graphs[1:]] == [n[:-5] for n in names if n.endswith(".diff")]
    changed = (folder / next(n for n in names if n.endswith("swiglu.diff"))).read_text()
    assert "+%npu_swiglu_default" in changed
    assert "[swiglu]" in changed
    assert data["pipeline"] == "normalise,lift,fuse{rms_norm=off},legalise"
    assert data["fusions"]["swiglu"] == 3
    (write,) = data["writes"]
    assert (write["input"], write["copies"]) == ("args[1]", False)
    assert "args[1]  bf16[48, 32]  in place" in (folder / "writes.txt").read_text()
    rows = {row["node"]: row for row in data["provenance"]}
    assert rows["npu_swiglu_default_1"]["rule"] == "swiglu"
    assert rows["npu_swiglu_default_1"]["layer"] == 1
    assert rows["npu_swiglu_default_1"]["source"].startswith("tests/extension/models.py:")
    assert all(row["source"] for row in rows.values())
    key = (folder / "key.txt").read_text()
    assert key.startswith(f"key {data['key']['key']}\n")
    assert "fuse.rms_norm = off" in key
    assert "args[1] = bfloat16[48, 32]" in key
