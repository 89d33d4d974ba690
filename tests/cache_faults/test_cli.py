"""`cannopy cache`: what is listed, compared, checked and removed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cannopy import cli
from cannopy.backend.cache import key, list_entries
from tests.backend.programs import compile_tiny, eager, tiny
from tests.cache_faults.test_machine import right

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("ls", "--json")`` on the test's folder: exit code and standard output."""

    def call(*arguments: str) -> tuple[int, str]:
        try:
            code = cli.main(["cache", *arguments, "--cache-dir", str(tmp_path)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Names of two entries that differ in an attribute and in the phase; the first is 40 days old and was hit twice."""
    right(tmp_path)
    right(tmp_path)
    right(tmp_path)
    (old,) = list_entries(tmp_path)
    at = time.time() - 40 * 86400
    os.utime(old.path / "manifest.json", (at, at))
    model = tiny()
    model.factor = 3.0
    compile_tiny(model, eager(tmp_path, text="phase=decode\nx=1"))
    new = next(e for e in list_entries(tmp_path) if e.path != old.path)
    return [old.path.name, new.path.name]


def test_ls(run: Run, two: list[str]) -> None:
    code, text = run("ls")
    assert code == 0
    lines = text.splitlines()
    assert lines[0].split()[:6] == ["entry", "phase", "made", "size", "weights", "hits"]
    assert lines[1].startswith(two[1])
    assert "decode" in lines[1]
    assert "40 d ago" in lines[2]
    assert " 2 " in lines[2]
    listed = json.loads(run("ls", "--json")[1])["entries"]
    assert [e["hits"] for e in listed] == [0, 2]
    assert [e["phase"] for e in listed] == ["decode", ""]
    assert listed[1]["used"] > listed[1]["created"] + 39 * 86400


def test_show_and_diff(run: Run, two: list[str]) -> None:
    code, text = run("show", two[1][:-2])
    assert code == 0
    assert "decode" in text
    assert "phase: decode" in text
    assert "scale: buffer float32[8]" in text
    code, text = run("diff", *two)
    assert code == 1
    assert "attributes (self.factor: 2.0 -> 3.0)" in text
    assert "phase: absent -> decode" in text
    assert run("diff", two[0], two[0])[0] == 0
    items = json.loads(run("diff", *two, "--json")[1])["differences"]
    assert {"field": "options", "item": "phase", "entry": None, "other": "decode"} in items
    code, text = run("show", "Tiny")
    assert code == 1
    assert "2 entries begin with 'Tiny'" in text


def test_verify(run: Run, two: list[str], tmp_path: Path) -> None:
    assert run("verify")[0] == 0
    (tmp_path / two[0] / "module.py").write_text("")
    code, text = run("verify")
    assert code == 1
    assert "module.py has 0 bytes" in text
    assert [e["problem"] is None for e in json.loads(run("verify", "--json")[1])["entries"]] == [True, False]
    assert run("prune", "--bad")[0] == 0
    assert [e.path.name for e in list_entries(tmp_path)] == [two[1]]


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        (["--older-than-days", "30"], [0]),
        (["--older-than-days", "50"], []),
        (["--unused-days", "30"], []),  # it was loaded a moment ago
        (["--max-size", "1MB"], []),
        (["--max-size", "50KB"], [1]),  # made before the other one was last loaded
        (["--max-size", "0B", "--keep", "1"], [0]),
        (["--stale"], []),
        (["--all"], [0, 1]),
        (["--all", "--keep", "1"], [0]),
    ],
    ids=lambda v: " ".join(map(str, v)),
)
def test_prune(run: Run, two: list[str], tmp_path: Path, arguments: list[str], gone: list[int]) -> None:
    later = time.time() + 5
    os.utime(tmp_path / two[0] / "uses", (later, later))
    code, text = run("prune", *arguments, "--dry-run")
    assert code == 0
    assert f"would remove {len(gone)}, " in text
    assert len(list_entries(tmp_path)) == 2
    done: Any = json.loads(run("prune", *arguments, "--json")[1])
    assert sorted(Path(r["path"]).name for r in done["removed"]) == sorted(two[i] for i in gone)
    assert {e.path.name for e in list_entries(tmp_path)} == {n for i, n in enumerate(two) if i not in gone}


def test_prune_of_other_versions(run: Run, two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = key.versions()
    monkeypatch.setattr(key, "versions", lambda packages=None: real | {"torch": "9.9"})
    code, text = run("prune", "--stale")
    assert code == 0
    assert f"torch {real['torch']} -> 9.9" in text
    assert "removed 2" in text


def test_prune_leaves_what_is_in_use_and_says_so(run: Run, tmp_path: Path) -> None:
    compiled, _, _ = compile_tiny(tiny(), eager(tmp_path))
    assert "in use" in run("ls")[1]
    code, text = run("prune", "--all")
    assert code == 1
    assert "keep Tiny-" in text
    assert "in use" in text
    assert len(list_entries(tmp_path)) == 1
    del compiled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune"], "--unused-days 30"),
        (["prune", "--max-size", "20 apples"], "expected a size as 500MB or 20GB"),
        (["prune", "--unused-days", "-1"], "expected days from 0"),
        (["prune", "--unused", "3"], "--unused-days"),
        (["shwo"], "show"),
    ],
)
def test_wrong_arguments(run: Run, arguments: list[str], words: str) -> None:
    code, text = run(*arguments)
    assert code in (1, 2)
    assert words in text
