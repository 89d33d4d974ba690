"""Is there a stand-in, and is it the right one?"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .cann import find_cann
from .manifest import LIBRARY_NAME, Manifest
from .problem import EnvironmentProblem, cannopy_command
from .source import generator_version
from .wheel import Search, Wheel, locate

State = Literal["not needed", "installed", "stale", "missing", "foreign"]
_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class StandinStatus:
    """Where the stand-in stands.

    not needed: real CANN is there. installed: complete and built for this torch_npu. stale: built
    for another torch_npu or by another generator, damaged, or in the way of real CANN. missing:
    not built yet. foreign: files that cannopy did not write hold the names of CANN's libraries.
    `cure` is the command that leads to a working import, empty when nothing is to be done.
    """

    state: State
    reason: str
    cure: str
    folder: Path
    torch_npu: str
    libraries: tuple[str, ...] = ()
    symbols: int = 0
    changed: bool = False
    """Whether the call that returned this changed anything on disk."""

    @property
    def usable(self) -> bool:
        """Whether torch_npu should import as far as CANN's libraries go."""
        return not self.cure

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {**asdict(self), "folder": str(self.folder), "libraries": list(self.libraries)}


def demand_platform() -> None:
    """Raise EnvironmentProblem off Linux on x86-64 or arm64, for which alone there are torch_npu wheels."""
    machine = os.uname().machine if hasattr(os, "uname") else "unknown"
    if sys.platform != "linux" or machine not in _MACHINES:
        raise EnvironmentProblem(
            f"torch_npu exists for Linux on x86-64 and arm64 only, and this is {sys.platform} on {machine}",
            'docker run --rm -it -v "$PWD:/work" -w /work python:3.11 bash',
        )


def status(site: Path | None = None) -> StandinStatus:
    """The stand-in of this interpreter's torch_npu, or of the one in `site`.

    Raises EnvironmentProblem when torch or torch_npu is missing or they do not match.
    """
    return wheel_status(locate(Search.here() if site is None else Search.site(site)))


def wheel_status(wheel: Wheel, *, changed: bool = False) -> StandinStatus:
    """`status` of a wheel already located. Reads ELF files only when there is no manifest."""
    manifest = Manifest.read(wheel.libs)
    state, reason, cure = _judge(wheel, manifest)
    libraries = tuple(manifest.libraries) if manifest else ()
    symbols = manifest.symbols if manifest else 0
    command = cannopy_command(f"host {cure}{wheel.search.arguments}") if cure else ""
    return StandinStatus(state, reason, command, wheel.libs, wheel.version, libraries, symbols, changed)


def own_files(libs: Path, manifest: Manifest | None) -> list[str]:
    """Names in `libs` that are cannopy's: as recorded, or by nature (our library, links to it)."""
    try:
        names = sorted(os.listdir(libs))
    except OSError:
        return []
    return [name for name in names if is_ours(libs / name, manifest)]


def is_ours(path: Path, manifest: Manifest | None) -> bool:
    """Whether cannopy wrote this file, and nobody replaced it since."""
    if path.name == LIBRARY_NAME or (path.is_symlink() and os.readlink(path) == LIBRARY_NAME):
        return True
    return manifest is not None and path.name in manifest.files and manifest.intact(path.parent, path.name)


def _judge(wheel: Wheel, manifest: Manifest | None) -> tuple[State, str, str]:
    """State, reason, and the `cannopy host` verb that cures it."""
    libs = wheel.libs
    cann = find_cann()
    if cann is not None and own_files(libs, manifest):
        # The wheel's RPATH is searched before LD_LIBRARY_PATH, so the stand-in would win.
        return "stale", f"real CANN is installed ({cann.library}), and the stand-in hides it", "uninstall"
    if cann is not None:
        return "not needed", f"real CANN is installed ({cann.library})", ""
    if manifest is not None:
        present = [name for name in manifest.files if os.path.lexists(libs / name)]
        replaced = [name for name in present if not is_ours(libs / name, manifest)]
        if replaced:
            return "foreign", f"{_list(replaced)} in {libs} no longer cannopy's", "install --force"
        reason = _why_stale(wheel, manifest)
        return ("stale", reason, "install") if reason else ("installed", "built for this torch_npu", "")
    if own_files(libs, None):
        return "stale", f"{libs} holds a stand-in without a readable manifest", "install"

    from .scan import missing_libraries  # pyelftools: only when there is something to find out

    missing = missing_libraries(wheel)
    foreign = [name for name in sorted(missing) if os.path.lexists(libs / name)]
    absent = [name for name in sorted(missing) if name not in foreign]
    if not missing:
        return "not needed", "the loader finds every library that torch_npu needs", ""
    if not foreign:
        return "missing", f"torch_npu needs {', '.join(absent)}, and this machine has no CANN", "install"
    if absent:
        reason = f"{_list(foreign)} in {libs} and not cannopy's, and {_list(absent)} missing"
        return "foreign", reason, "install --force"
    return "foreign", f"all of CANN's libraries are in {libs} and not cannopy's; they are left alone", ""


def _why_stale(wheel: Wheel, manifest: Manifest) -> str:
    if manifest.torch_npu != wheel.version:
        return f"it was built for torch_npu {manifest.torch_npu}, and {wheel.version} is installed"
    if manifest.generator != generator_version():
        return "it was built by another version of cannopy"
    if not manifest.core.matches(wheel.core):
        return f"libtorch_npu.so of torch_npu {wheel.version} has changed since it was built"
    broken = [name for name in manifest.files if not manifest.intact(wheel.libs, name)]
    return f"{_list(broken)} missing or damaged" if broken else ""


def _list(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
