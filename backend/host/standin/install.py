"""Build, place and remove the stand-in of one torch_npu wheel.

Everything is made in a temporary folder beside the destination and then renamed into place, so a
failed build leaves what was there. The manifest goes in before the libraries: an interruption then
shows as "stale", which the next install repairs, and never as files of unknown origin.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .cann import find_cann
from .manifest import LIBRARY_NAME, MANIFEST_NAME, CoreStamp, Manifest, sha256
from .problem import EnvironmentProblem, cannopy_command
from .source import c_source, generator_version
from .status import StandinStatus, demand_platform, is_ours, own_files, wheel_status
from .wheel import Search, Wheel, locate


def install(site: Path | None = None, force: bool = False) -> StandinStatus:
    """Build and place the stand-in for this interpreter's torch_npu or the one in `site`.

    Does nothing when an up-to-date one is there. `force` rebuilds that too, and replaces foreign
    files of the same names. Raises EnvironmentProblem when real CANN is there, when there is no
    compiler, when the folder cannot be written, or when torch and torch_npu are not as they must be.
    """
    return install_for(Search.here() if site is None else Search.site(site), force)


def uninstall(site: Path | None = None) -> StandinStatus:
    """Remove the manifest's files that are still as installed, the manifest, and the folder if empty.

    Foreign or replaced files stay. Does nothing when there is no stand-in.
    """
    return uninstall_for(Search.here() if site is None else Search.site(site))


def install_for(search: Search, force: bool = False) -> StandinStatus:
    """`install`, with a Search to say where."""
    demand_platform()
    wheel = locate(search)
    before = wheel_status(wheel)
    cann = find_cann()
    if cann is not None:
        raise EnvironmentProblem(
            f"real CANN is installed ({cann.library}); a stand-in would hide it from torch_npu",
            before.cure or cannopy_command("doctor"),
        )
    if before.state == "not needed" or (before.state == "installed" and not force):
        return before
    if before.state == "foreign" and not force:
        if before.usable:
            return before
        raise EnvironmentProblem(before.reason, before.cure)
    _build_and_place(wheel, force)
    return wheel_status(wheel, changed=True)


def uninstall_for(search: Search) -> StandinStatus:
    """`uninstall`, with a Search to say where."""
    wheel = locate(search)
    manifest = Manifest.read(wheel.libs)
    recorded = (wheel.libs / MANIFEST_NAME).exists()
    names = own_files(wheel.libs, manifest)
    with _writing(wheel, "uninstall"):
        for name in names:
            (wheel.libs / name).unlink(missing_ok=True)
        if recorded:
            (wheel.libs / MANIFEST_NAME).unlink(missing_ok=True)
        if wheel.libs.is_dir() and not any(wheel.libs.iterdir()):
            wheel.libs.rmdir()
    return wheel_status(wheel, changed=bool(names) or recorded)


def _build_and_place(wheel: Wheel, force: bool) -> None:
    # Not at the top: status runs before every command, and these are for building only.
    import tempfile

    from .compiler import build, compiler_name, demand_compiler
    from .scan import wanted

    compiler = demand_compiler()
    want = wanted(wheel)
    source = c_source(want.symbols)
    with _writing(wheel, "install"), tempfile.TemporaryDirectory(prefix=".cannopy-", dir=wheel.site) as made:
        folder = Path(made)
        library = build(compiler, source, folder)
        files = {LIBRARY_NAME: sha256(library)}
        for name in sorted(want.libraries):
            (folder / name).symlink_to(LIBRARY_NAME)
            files[name] = f"-> {LIBRARY_NAME}"
        manifest = Manifest(
            torch_npu=wheel.version,
            core=CoreStamp.of(wheel.core),
            generator=generator_version(),
            compiler=compiler_name(compiler),
            symbols=len(want.symbols),
            files=files,
        )
        _place(wheel, folder, manifest, force)


def _place(wheel: Wheel, made: Path, manifest: Manifest, force: bool) -> None:
    libs = wheel.libs
    libs.mkdir(exist_ok=True)
    old = Manifest.read(libs)
    foreign = [n for n in manifest.files if os.path.lexists(libs / n) and not is_ours(libs / n, old)]
    if foreign and not force:
        raise EnvironmentProblem(
            f"{', '.join(foreign)} in {libs} not written by cannopy",
            cannopy_command(f"host install --force{wheel.search.arguments}"),
        )
    for name in own_files(libs, old):
        if name not in manifest.files:
            (libs / name).unlink()
    manifest.write(libs)
    for name in manifest.files:
        os.replace(made / name, libs / name)


@contextmanager
def _writing(wheel: Wheel, verb: str) -> Iterator[None]:
    """Turn a refusal of the file system into an EnvironmentProblem."""
    try:
        yield
    except OSError as error:
        again = f"host {verb}{wheel.search.arguments}"
        if error.errno == errno.ENOSPC:
            cure = f"df -h {wheel.site}"
        elif error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0:
            cure = f"sudo {cannopy_command(again, absolute=True)}"
        else:
            cure = (
                f"{sys.executable} -m venv ~/cannopy"
                f' && ~/cannopy/bin/pip install cannopy "torch_npu=={wheel.version}"'
                " && ~/cannopy/bin/cannopy host install"
            )
        problem = f"{wheel.site} cannot be written: {error.strerror or error}"
        raise EnvironmentProblem(problem, cure) from error
