"""Virtual environments made from what is installed here: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
FOLDERS = ("cannopy", "frontend", "fx_passes", "fusion_rules", "stream_scheduler", "superkernel", "models", "backend")
LIGHT = ("rich", "markdown_it", "mdurl", "pygments", "yaml", "elftools", "sympy", "mpmath")
"""The packages behind the run-time dependencies of pyproject.toml."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment at ``path``."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site(self) -> Path:
        (found,) = self.path.glob("lib/python*/site-packages")
        return found

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """``bin/<command>`` in a folder that is not the repository, with no Python setting of the caller's."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        first = self.path / "bin" / command[0]
        return subprocess.run(
            [str(first), *command[1:]], cwd=cwd or self.path, env=env, capture_output=True, text=True, check=False
        )

    def install(self, *arguments: str) -> None:
        """pip install from local files only."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", *arguments], check=True, cwd=self.path)


def new_environment(path: Path) -> Environment:
    """An empty virtual environment, without pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    return Environment(path)


def link_packages(environment: Environment, *, torch: bool, standin: bool = True) -> None:
    """Give the environment what is installed here by links: the light dependencies, or all with torch.

    ``standin`` False leaves out torch_npu.libs, as on a machine where it was not installed.
    """
    for entry in SITE.iterdir():
        name = entry.name
        if name.endswith(".pth") or name.lower().startswith(("cannopy", "__editable__", "__pycache__")):
            continue
        wanted = (standin or name != "torch_npu.libs") if torch else name in LIGHT
        target = environment.site / name
        if wanted and not target.exists():
            target.symlink_to(entry)


def copy_source(folder: Path) -> Path:
    """A copy of what a source archive has, so that no build folder appears in the repository."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel of ``source``, built with the setuptools that is installed here."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
