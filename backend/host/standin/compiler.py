"""Find the system's C compiler and build the stand-in library with it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from .manifest import LIBRARY_NAME
from .problem import EnvironmentProblem
from .source import COMPILER_FLAGS

_PACKAGE_MANAGERS = {
    "debian": "apt-get install -y gcc",
    "ubuntu": "apt-get install -y gcc",
    "alpine": "apk add gcc",
    "suse": "zypper install -y gcc",
    "arch": "pacman -S --noconfirm gcc",
}
_OTHER_MANAGER = "dnf install -y gcc"  # openEuler, Fedora, RHEL, CentOS, Kylin
_OS_RELEASE = Path("/etc/os-release")


def find_compiler() -> list[str] | None:
    """The command of a C compiler: $CC, then cc, gcc, clang; None when there is none."""
    wanted = os.environ.get("CC", "").strip()
    for candidate in ([wanted] if wanted else []) + ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def demand_compiler() -> list[str]:
    """As find_compiler, but raises EnvironmentProblem when there is none."""
    command = find_compiler()
    if command is None:
        raise EnvironmentProblem(
            "no C compiler found (looked for $CC, cc, gcc, clang); the CANN stand-in is built with it",
            compiler_cure(),
        )
    return command


def compiler_cure() -> str:
    """The command that installs gcc on this distribution."""
    try:
        words = _OS_RELEASE.read_text().lower()
    except OSError:
        words = ""
    ids = [line.split("=", 1)[1] for line in words.splitlines() if line.startswith(("id=", "id_like="))]
    named = " ".join(ids)
    install = next((cmd for key, cmd in _PACKAGE_MANAGERS.items() if key in named), _OTHER_MANAGER)
    return install if os.geteuid() == 0 else f"sudo {install}"


def compiler_name(command: list[str]) -> str:
    """First line of `--version`, or the bare command when it has none."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return shlex.join(command)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else shlex.join(command)


def build(command: list[str], source: str, folder: Path) -> Path:
    """Compile `source` to `folder`/libcannopy_standin.so and return that path.

    Raises EnvironmentProblem with the compiler's first complaint.
    """
    (folder / "standin.c").write_text(source)
    # Relative names: the result depends on the source alone, not on the temporary folder.
    line = [*command, *COMPILER_FLAGS, f"-Wl,-soname,{LIBRARY_NAME}", "-o", LIBRARY_NAME, "standin.c"]
    try:
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        complaint = done.stderr.strip().splitlines()[:1] if done.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        complaint = [str(error)]
    if complaint is not None:
        raise EnvironmentProblem(
            f"the C compiler `{shlex.join(command)}` failed: {complaint[0] if complaint else 'no message'}",
            compiler_cure(),
        )
    return folder / LIBRARY_NAME
