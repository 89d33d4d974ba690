"""Is Huawei's CANN on this machine? Looked for by file, without loading or importing anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .manifest import MANIFEST_NAME
from .problem import EnvironmentProblem

RUNTIME = "libascendcl.so"
"""The library every CANN toolkit and runtime package has; a driver-only machine does not have it."""

INSTALL_ROOT = Path("/usr/local/Ascend")
LOADER_CACHE = Path("/etc/ld.so.cache")


@dataclass(frozen=True)
class Cann:
    """Where CANN's runtime library is, and whether the dynamic loader would find it there."""

    library: Path
    loadable: bool

    def demand_loadable(self) -> None:
        """Raise EnvironmentProblem when CANN is installed but its set_env.sh was not sourced."""
        if self.loadable:
            return
        for folder in self.library.parents:
            if (folder / "set_env.sh").is_file():
                cure = f"source {folder}/set_env.sh"
                break
        else:
            cure = f'export LD_LIBRARY_PATH="{self.library.parent}:$LD_LIBRARY_PATH"'
        raise EnvironmentProblem(f"CANN is installed ({self.library}) but not set up in this shell", cure)


def find_cann() -> Cann | None:
    """CANN's runtime library in the places its installers and set_env.sh use.

    In order: LD_LIBRARY_PATH, the loader's cache, ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME,
    /usr/local/Ascend. A folder that holds a stand-in of ours does not count.
    """
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        folder = Path(entry)
        if entry and (folder / RUNTIME).exists() and not (folder / MANIFEST_NAME).exists():
            return Cann(folder / RUNTIME, loadable=True)
    try:
        cache = LOADER_CACHE.read_bytes()
    except OSError:
        cache = b""
    # Entries of ld.so.cache are NUL-terminated: the bare name, then the full path.
    end = cache.find(b"/" + RUNTIME.encode() + b"\0")
    if end >= 0:
        start = cache.rfind(b"\0", 0, end) + 1
        return Cann(Path(os.fsdecode(cache[start:end])) / RUNTIME, loadable=True)
    for library in _toolkit_libraries():
        return Cann(library, loadable=False)
    return None


def real_cann_present() -> bool:
    """True when CANN is installed, set up or not. A few file look-ups; nothing is imported."""
    return find_cann() is not None


def demand_sane_variables() -> None:
    """Raise EnvironmentProblem when ASCEND_HOME_PATH is set on a machine without CANN.

    `import torch_npu` then insists on CANN's folders below it and fails.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    if home is not None:
        raise EnvironmentProblem(
            f"ASCEND_HOME_PATH={home} is set, but no CANN is there; torch_npu refuses to import then",
            "unset ASCEND_HOME_PATH",
        )


def _toolkit_libraries() -> Iterator[Path]:
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        home = os.environ.get(variable)
        if home:
            for pattern in (f"lib64/{RUNTIME}", f"*/lib64/{RUNTIME}"):
                yield from sorted(Path(home).glob(pattern))
    for pattern in (f"*/lib64/{RUNTIME}", f"*/*/lib64/{RUNTIME}"):
        yield from sorted(INSTALL_ROOT.glob(pattern))
