"""Find torch and torch_npu on disk without importing them.

Importing either runs torch's backend auto-load, which is what fails without CANN. Versions are
read from the names of the .dist-info folders (fixed by the wheel format), because importlib.metadata
takes 45 ms to import and this runs before every command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .problem import EnvironmentProblem, pip_install

CORE_LIBRARY = "lib/libtorch_npu.so"
DEFAULT_RELEASE = "2.13.0"
"""The torch_npu release to propose when neither torch nor torch_npu is there to go by."""


@dataclass(frozen=True)
class Search:
    """Where to look for packages, whose they are, and how to say so on the command line."""

    folders: tuple[str, ...]
    python: str
    arguments: str = ""

    @classmethod
    def here(cls) -> Search:
        """This interpreter."""
        return cls(tuple(sys.path), sys.executable)

    @classmethod
    def site(cls, site: Path) -> Search:
        """One site-packages folder. Cures name the python of the venv it belongs to, if it does."""
        site = site.absolute()
        python = site.parents[2] / "bin" / "python" if len(site.parents) > 2 else site
        owner = str(python) if python.is_file() else sys.executable
        return cls((str(site),), owner, f" --site-packages {site}")

    @classmethod
    def interpreter(cls, python: str) -> Search:
        """Another interpreter, asked for its sys.path. EnvironmentProblem when it does not run."""
        import json
        import subprocess

        code = "import json, sys; print(json.dumps(sys.path[1:]))"
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"the interpreter {python} does not run: {error}"
            raise EnvironmentProblem(problem, "command -v python3") from error
        return cls(tuple(json.loads(done.stdout)), python, f" --python {python}")


@dataclass(frozen=True)
class Wheel:
    """An installed torch_npu: its site-packages folder, version, and the torch it will load."""

    site: Path
    version: str
    torch_version: str
    torch_package: Path
    search: Search

    @property
    def package(self) -> Path:
        """The folder of the package torch_npu."""
        return self.site / "torch_npu"

    @property
    def core(self) -> Path:
        """libtorch_npu.so, whose hash identifies the build."""
        return self.package / CORE_LIBRARY

    @property
    def libs(self) -> Path:
        """The folder that the wheel's RPATH names (`$ORIGIN/../../torch_npu.libs`); not part of the wheel."""
        return self.site / "torch_npu.libs"


def minor(version: str) -> str:
    """`2.13` of `2.13.0.post1+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def release_of(version: str) -> str:
    """`2.13.0` of `2.13.0.post1+cpu`: the torch that this torch_npu asks for."""
    return ".".join(version.split("+")[0].split(".")[:3])


def installed_version(distribution: str, folders: Sequence[str]) -> str | None:
    """Version of a distribution found in `folders`, first folder first; None when absent."""
    prefixes = (f"{distribution}-", f"{distribution.replace('_', '-')}-")
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and name.lower().startswith(prefixes):
                stem = name.rsplit(".", 1)[0]
                return stem[len(distribution) + 1 :].split("-")[0]
    return None


def find_package(name: str, folders: Sequence[str]) -> Path | None:
    """The folder of a regular package called `name`; a bare folder left behind by pip does not count."""
    for folder in folders:
        package = Path(folder or ".") / name
        if (package / "__init__.py").is_file():
            return package
    return None


def locate(search: Search) -> Wheel:
    """The torch_npu wheel and its torch.

    Raises EnvironmentProblem when either is missing, or when their minor versions differ.
    """
    package = find_package("torch_npu", search.folders)
    torch_package = find_package("torch", search.folders)
    torch_version = installed_version("torch", search.folders)
    if package is None or not (package / CORE_LIBRARY).is_file():
        release = f"{minor(torch_version)}.*" if torch_version else DEFAULT_RELEASE
        raise EnvironmentProblem("torch_npu is not installed", pip_install(f'"torch_npu=={release}"', search.python))
    site = package.parent
    version = installed_version("torch_npu", [str(site)]) or "unknown"
    release = DEFAULT_RELEASE if version == "unknown" else f"{minor(version)}.*"
    install_torch = torch_install(release, search.python)
    if torch_package is None or torch_version is None:
        raise EnvironmentProblem("torch is not installed", install_torch)
    if version != "unknown" and minor(version) != minor(torch_version):
        raise EnvironmentProblem(
            f"torch {torch_version} and torch_npu {version} do not belong together: torch_npu loads only"
            f" with the torch of its own minor version, {minor(version)}",
            install_torch,
        )
    return Wheel(site, version, torch_version, torch_package, search)


def torch_install(release: str, python: str) -> str:
    """Command for the CPU build of torch: torch_npu refuses to share a process with a CUDA device."""
    return pip_install(f'"torch=={release}" --index-url https://download.pytorch.org/whl/cpu', python)
