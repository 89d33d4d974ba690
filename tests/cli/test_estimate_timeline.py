"""`cannopy estimate --timeline`: the three plans of a described model, drawn and written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cannopy import cli

MODEL = ["estimate", "kimi-k2", "--parallel", "ep=128,dp=128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("estimated") / "new"


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*MODEL, "--timeline", str(folder), "--json"]) == 0
    return json.loads(out.getvalue())


def test_the_page_shows_what_is_said(folder: Path, said: dict[str, Any]) -> None:
    drawn = said["timeline"]
    assert drawn["files"] == [str(folder / name) for name in ("timeline.html", "trace.json", "plan.yaml")]
    page = (folder / "timeline.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    times = {run["name"]: run["us"] + run["host_us"] for run in data["runs"]}
    assert list(times) == ["serial", "expert", "automatic"]
    assert times == pytest.approx(drawn["runs"], abs=1e-2)
    assert drawn["lower_bound_us"] < times["automatic"] < times["expert"] < times["serial"]
    assert len({len(run["kernels"]) for run in data["runs"]}) == 1
    assert "<b>ep=128,dp=128</b>" in page
    assert "nothing here was measured on a device" in page


def test_the_plan_and_the_trace_are_those_of_the_page(folder: Path, said: dict[str, Any]) -> None:
    plan = yaml.safe_load((folder / "plan.yaml").read_text(encoding="utf-8"))
    assert plan["target"] == "atlas-a3"
    assert plan["predicted_us"] == pytest.approx(said["timeline"]["runs"]["automatic"], abs=1e-2)
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(names) == 3
    assert all(name.startswith(one) for name, one in zip(names, ("serial", "expert", "automatic"), strict=True))


@pytest.mark.parametrize(("more", "words"), [
    (["--timeline", "{file}"], "it is a file"),
    (["--timeline", "out", "--size", "tiny"], "cannopy timeline MODEL --out DIR"),
])
def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    (tmp_path / "taken").write_text("")
    assert cli.main([*MODEL, *(word.format(file=tmp_path / "taken") for word in more)]) == 1
    assert words in capsys.readouterr().err
