"""`cannopy rules`: what is listed, and that rule files and switches are checked without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cannopy.cli import main
from cannopy.fusion_rules import catalog

EXAMPLE = Path(__file__).parents[2] / "examples" / "unit_norm.py"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = "normalise,lift,fuse{swiglu=off},legalise"
    assert main(["rules", "--json", "--rules", str(EXAMPLE), "--pipeline", text]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rules"]
    names = list(dict.fromkeys(row["rule"] for row in rows))
    assert names == [*dict.fromkeys(rule.name for rule in (*catalog.LIFT, *catalog.fusions())), "unit_norm"]
    assert {row["switch"] for row in rows if row["rule"] == "swiglu"} == {"off"}
    assert rows[-1]["origin"].startswith(f"{EXAMPLE}:")
    assert found["pipeline"] == text


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["rules", "--rules", str(EXAMPLE)]) == 0
    shown = capsys.readouterr().out
    assert "unit_norm" in shown
    assert "unit_norm.py:" in shown
    assert main(["rules"]) == 0
    assert "defined at" not in capsys.readouterr().out


def test_blocks_fit_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rules", "--fusion", "swiglu=off"]) == 0
    *lines, pipeline = capsys.readouterr().out.rstrip().splitlines()
    assert pipeline.startswith("pipeline: ")
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line and not line.startswith(" ")]
    names = dict.fromkeys(rule.name for rule in (*catalog.LIFT, *catalog.fusions()))
    assert [line.split()[0] for line in heads] == list(names)
    assert "swiglu  off  npu_swiglu" in heads
    text = " ".join(" ".join(lines).split())
    assert all(" ".join(rule.equation.split()) in text for rule in catalog.fusions())


def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["rules", "--fusion", "swigly=off"]) == 1
    assert "did you mean 'swiglu'" in capsys.readouterr().err
    (tmp_path / "r.py").write_text("import cannopy\n1 / 0\n")
    assert main(["rules", "--rules", str(tmp_path / "r.py")]) == 1
    assert "r.py:2: ZeroDivisionError" in capsys.readouterr().err
