"""`cannopy doctor` and `cannopy host`: exit codes, JSON, and a cure on every failing line."""

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest

from cannopy.backend.host.standin import cann, compiler, examine
from cannopy.backend.host.standin.wheel import Search
from cannopy.cli import doctor, host
from tests.host.test_standin import make_wheel

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="builds small libraries")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cann, "INSTALL_ROOT", tmp_path / "Ascend")
    monkeypatch.setattr(cann, "LOADER_CACHE", tmp_path / "ld.so.cache")
    site = make_wheel(tmp_path / "site-packages")
    monkeypatch.setattr(Search, "here", lambda: Search((str(site),), sys.executable))
    return site


def cannopy(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="cannopy")
    subparsers = parser.add_subparsers(required=True)
    host.add_parser(subparsers)
    doctor.add_parser(subparsers)
    args = parser.parse_args(arguments)
    code: int = args.func(args)
    return code


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    code = cannopy("doctor", "--json", "--no-import")
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    assert all(check["cure"] for check in found["checks"] if check["state"] == "failed")
    return {check["name"]: check for check in found["checks"]}


def test_doctor_before_and_after_install(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = checks(capsys)
    assert before["CANN"]["state"] == "failed"
    assert before["CANN"]["cure"].endswith("host install")
    assert cannopy("host", "install") == 0
    after = checks(capsys)
    assert after["CANN"]["found"].startswith("stand-in (3 libraries, 6 functions)")
    assert {check["state"] for check in after.values()} == {"ok", "optional"}
    assert after["scipy"]["state"] == "optional"  # needed by CANN's own compiler only
    assert cannopy("doctor", "--no-import") == 0
    assert "torch and torch_npu match" in capsys.readouterr().out


def test_doctor_names_each_failure(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cannopy("host", "install")
    shutil.rmtree(site / "google")
    assert checks(capsys)["protobuf"]["cure"].endswith("pip install protobuf")
    (site / "torch-2.13.0+cpu.dist-info").rename(site / "torch-2.9.0.dist-info")
    assert "do not belong together" in checks(capsys)["torch and torch_npu match"]["found"]
    shutil.rmtree(site / "torch-2.9.0.dist-info")
    found = checks(capsys)
    assert found["torch"]["found"] == "not installed"
    assert '"torch==2.13.*"' in found["torch"]["cure"]
    assert cannopy("doctor", "--no-import") == 1
    assert '-m pip install "torch==2.13.*"' in capsys.readouterr().out


def test_doctor_wants_a_compiler_only_to_build(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        patch.delenv("CC", raising=False)
        assert checks(capsys)["C compiler"]["state"] == "failed"
    cannopy("host", "install")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert checks(capsys)["C compiler"]["state"] == "optional"


TWO_DEVICES = """terminate called after throwing an instance of 'c10::ValueError'
  what():  Duplicated key 'pinned_reserve' found in device-specific configuration parser hook registration
Exception raised from registerDeviceConfigParserHook at c10/core/AllocatorConfig.h:273 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7face575e60d in libc10.so)
<omitting python frames>

"""


@pytest.mark.parametrize(
    ("stderr", "reason", "cure"),
    [
        ("Traceback\n  File x\nModuleNotFoundError: No module named 'google'\n", "google", "pip install protobuf"),
        ("ImportError: libnew.so: cannot open shared object file\n", "libnew.so", "host install --force"),
        ("", "ended with code -11", "host install --force"),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  no such thing\nframe #0: f (x.so)\n",
         "no such thing", "host install --force"),
        (TWO_DEVICES, "beside a CUDA build of torch, as both register the allocator option 'pinned_reserve'",
         '-m pip install "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu'),
    ],
)
def test_import_error_becomes_one_line(
    site: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str, cure: str
) -> None:
    def run(*args: object, **kwargs: object) -> argparse.Namespace:
        return argparse.Namespace(returncode=-11, stdout="", stderr=stderr)

    monkeypatch.setattr(examine.subprocess, "run", run)
    [check] = examine._import_checks("")
    assert (check.state, reason in check.found, check.cure.endswith(cure)) == ("failed", True, True)
    assert examine._import_checks("the first cure")[0].cure == "the first cure"


def test_host_verbs(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--site-packages", str(site))
    assert cannopy("host", "status", *where) == 1
    assert f"host install --site-packages {site}\n" in capsys.readouterr().out
    assert cannopy("host", "install", "--json", *where) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "installed"
    assert cannopy("host", "install", *where) == 0
    assert "(nothing was changed)" in capsys.readouterr().out
    assert cannopy("host", "status", "--json", *where) == 0
    assert json.loads(capsys.readouterr().out)["cure"] == ""
    assert cannopy("host", "uninstall", *where) == 0
    assert capsys.readouterr().out == "removed\n"
    assert cannopy("host", "uninstall", *where) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_host_reports_a_problem_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cannopy("host", "status", "--site-packages", str(tmp_path)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("torch_npu is not installed\n  cure: ")
    assert cannopy("host", "status", "--json", "--site-packages", str(tmp_path)) == 1
    assert json.loads(capsys.readouterr().out)["problem"] == "torch_npu is not installed"
    assert cannopy("host", "status", "--python", str(tmp_path / "python")) == 1
    assert "does not run" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["host"], ["host", "install"], ["doctor"]])
def test_help_teaches(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cannopy(*verb, "--help")
    assert f"cannopy {verb[0]}" in capsys.readouterr().out.split("examples:")[1]
