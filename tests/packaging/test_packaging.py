"""The folders at the root import as one package, from a wheel and editable."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import (
    FOLDERS,
    ROOT,
    SITE,
    Environment,
    build_wheel,
    copy_source,
    link_packages,
    new_environment,
)

DATA = (".typed", ".yaml", ".csv", ".html", ".css", ".js", ".c", ".py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_source(base / "source"), base)


@pytest.fixture(scope="module")
def without_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = new_environment(tmp_path_factory.mktemp("light") / "venv")
    environment.install(str(wheel))
    link_packages(environment, torch=False)
    return environment


@pytest.fixture(scope="module")
def without_standin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = new_environment(tmp_path_factory.mktemp("bare") / "venv")
    environment.install(str(wheel))
    link_packages(environment, torch=True, standin=False)
    return environment


def _expected_files() -> set[str]:
    """Names in the wheel for every source and data file of the repository's folders."""
    found = set()
    for folder in FOLDERS:
        prefix = "" if folder == "cannopy" else "cannopy/"
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in DATA and "__pycache__" not in path.parts:
                found.add(prefix + path.relative_to(ROOT).as_posix())
    return found


def test_wheel_has_every_file_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == _expected_files()


def test_wheel_has_licence_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "cannopy = cannopy.cli:main" in archive.read(entry_points).decode()
    (licence,) = (n for n in archive.namelist() if n.endswith("licenses/LICENSE"))
    assert b"Apache License" in archive.read(licence)


def test_every_folder_is_mapped():
    """A new folder with packages must be in pyproject.toml, setup.py and the type check as well."""
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= set(FOLDERS)
    for file in ("pyproject.toml", "setup.py", "tools/typecheck.py"):
        text = (ROOT / file).read_text()
        assert [f for f in FOLDERS[1:] if f not in text] == []


def test_wheel_does_not_claim_common_names(without_torch):
    code = "import importlib.util as u, sys; sys.exit([n for n in sys.argv[1:] if u.find_spec(n)] or 0)"
    done = without_torch.run("python", "-c", code, *FOLDERS[1:], "tests", "tools", "setup")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["host", "--help"], ["--version"]])
def test_help_works_without_torch(without_torch, command):
    done = without_torch.run("cannopy", *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannopy" in done.stdout


def test_doctor_works_without_torch(without_torch):
    done = without_torch.run("cannopy", "doctor", "--json", "--no-import")
    checks = {c["name"]: c["state"] for c in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["torch"] == "failed"


NEED_TORCH = [
    ["run", "deepseek-v3.2"],
    ["compile", "deepseek-v3.2"],
    ["explain", "deepseek-v3.2"],
    ["explain", "deepseek-v3.2", "--rule", "rms_norm"],
    ["dump", "deepseek-v3.2"],
    ["cache", "ls"],
]


def _one_message(done, *words: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[1].startswith("  cure: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", NEED_TORCH, ids=" ".join)
def test_without_torch_every_verb_says_so(without_torch, command):
    _one_message(without_torch.run("cannopy", *command), "torch", "pip install")


@pytest.mark.parametrize("command", NEED_TORCH, ids=" ".join)
def test_without_standin_every_verb_says_so(without_standin, command):
    _one_message(without_standin.run("cannopy", *command), "stand-in", "host install")


def test_json_error_is_json(without_standin):
    done = without_standin.run("cannopy", "run", "deepseek-v3.2", "--json")
    problem = json.loads(done.stdout)
    assert done.returncode == 2
    assert (problem["error"], done.stderr) == ("NotReadyError", "")
    assert "host install" in problem["cure"]


@pytest.mark.parametrize("statement", ["cannopy.compile", "from cannopy import compile"])
def test_python_api_raises_the_same_message(without_standin, statement):
    code = f"import cannopy\ntry:\n    {statement}\nexcept cannopy.CannopyError as e:\n    print(e)"
    done = without_standin.run("python", "-c", code)
    assert done.stderr == ""
    assert "stand-in" in done.stdout
    assert "cure: " in done.stdout


def test_wheel_compiles_a_module(wheel, tmp_path):
    """Contracts, templates and rules are in the wheel: a module goes through torchair and gives its eager result."""
    environment = new_environment(tmp_path / "venv")
    environment.install(str(wheel))
    link_packages(environment, torch=True)
    code = """
import cannopy, torch
assert cannopy.__file__.startswith({site!r}), cannopy.__file__
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 16)).eval()
x = torch.randn(4, 32)
compiled = cannopy.compile(model, example_inputs=(x,), options=cannopy.Options(cache_dir={cache!r}))
torch.testing.assert_close(compiled(x), model(x))
print(sorted(compiled.report.to_dict()))
"""
    text = code.format(site=str(environment.site), cache=str(tmp_path / "cache"))
    done = environment.run("python", "-c", text)
    assert done.returncode == 0, done.stderr
    assert "cache_copies" in done.stdout


def test_editable_install_follows_the_source(tmp_path):
    source = copy_source(tmp_path / "source")
    environment = new_environment(tmp_path / "venv")
    link_packages(environment, torch=False)
    for part in (*SITE.glob("setuptools*"), SITE / "_distutils_hack"):
        (environment.site / part.name).symlink_to(part)
    environment.install("--no-build-isolation", "--editable", str(source))
    (source / "frontend" / "added_later.py").write_text("VALUE = 7\n")
    code = "import cannopy.frontend.added_later as a, cannopy.backend as b; print(a.VALUE, b.__file__)"
    done = environment.run("python", "-c", code)
    assert done.stderr == ""
    assert done.stdout.split() == ["7", str(source / "backend" / "__init__.py")]
