"""`tools/compat.py`: nothing that was found is lost, and what is wrong is told by the exit code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import compat

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.{name}.test_a" name="test_good"/>
<testcase classname="tests.{name}.test_a" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.{name}.test_a" name="test_lacking"><skipped message="no argument k"/></testcase>
</testsuite></testsuites>"""
REPORT = {"phases": {"decode": {"kernels": {"A": 2, "B": 1}}}, "parity": {"passed": True, "failures": []}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results in a folder of their own; environments exist, main jobs hold, each entry of `CORE` has one failure."""
    monkeypatch.setattr(compat, "FOUND", tmp_path / "compat.yaml")
    monkeypatch.setattr(compat, "PAGE", tmp_path / "compat.md")
    monkeypatch.setattr(compat, "set_up", lambda environment: [])
    monkeypatch.setattr(compat.Environment, "version", lambda self, package: f"{self.name}.0")

    def run(self: compat.Environment, *command: str, **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, json.dumps(REPORT) if "cannopy" in command else "3.11.7\n", "")

    def watch(self: compat.Environment, step: str, seconds: float, *command: str) -> int:
        target = next(part for part in command if part.startswith("--junitxml=")).partition("=")[2]
        Path(target).write_text(JUNIT.format(name=step.split()[-1]), encoding="utf-8")
        return 1

    monkeypatch.setattr(compat.Environment, "run", run)
    monkeypatch.setattr(compat.Environment, "watch", watch)
    return tmp_path


def found(here: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((here / "compat.yaml").read_text(encoding="utf-8"))["found"]
    return data


def test_all_versions_and_the_page_in_one_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compat.main([]) == 1
    entries = len(compat.CORE)
    assert list(found(here)) == [e.name for e in compat.environments()]
    for outcome in found(here).values():
        assert (outcome["passed"], len(outcome["failed"]), outcome["skips"]) == (
            entries, entries, {"no argument k": entries})
    assert (here / "compat.md").read_text(encoding="utf-8").count("passed, ") == 2
    said = capsys.readouterr()
    assert "2.8: main job ok, parity holds" in said.out
    assert "compat 2.14: kernels.test_a::test_bad fails" in said.err


def test_failures_with_a_reason_are_no_fault(here: Path) -> None:
    reasons = {f"{name}.test_a": "torch lacks it" for name in compat.CORE}
    (here / "compat.yaml").write_text(yaml.safe_dump({"found": {}, "reasons": reasons}), encoding="utf-8")
    assert compat.main(["2.8"]) == 0
    assert "test_bad`: torch lacks it" in (here / "compat.md").read_text(encoding="utf-8")


def test_an_environment_that_cannot_be_made_loses_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compat.main([])
    before = found(here)["2.8"]

    def set_up(environment: compat.Environment) -> list[str]:
        if environment.name == "2.8":
            raise compat.NotMadeError("pip: no space left")
        return ["made anew"]

    monkeypatch.setattr(compat, "set_up", set_up)
    assert compat.main([]) == 1
    assert found(here)["2.8"] == before
    assert found(here)["2.14"]["notes"] == ["made anew"]
    assert "compat 2.8: pip: no space left; what an earlier run found is kept" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_steps(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = compat.Environment.watch

    def interrupted(self: compat.Environment, step: str, seconds: float, *command: str) -> int:
        if step == "tests of passes":
            raise KeyboardInterrupt
        return watch(self, step, seconds, *command)

    monkeypatch.setattr(compat.Environment, "watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compat.main(["2.8"])
    outcome = found(here)["2.8"]
    assert (outcome["job"], outcome["parity"], outcome["passed"]) == ("ok", "holds", 2)
    assert outcome["unrun"] == ["passes", "frontend", "rules"]
    assert "; not run: passes, frontend, rules |" in (here / "compat.md").read_text(encoding="utf-8")


def test_a_step_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    (tmp_path / ".compat" / "2.8" / "bin").mkdir(parents=True)
    (tmp_path / ".compat" / "2.8" / "bin" / "python").symlink_to("/bin/sh")
    environment = compat.Environment("2.8", ())
    assert environment.watch("step", 0.2, "-c", "echo '. [ 50%]'; sleep 60") < 0
    assert (tmp_path / ".compat" / "2.8.step.log").read_text(encoding="utf-8") == ". [ 50%]\n"
