"""The one error this package raises at a user: what is wrong, and the command that cures it."""

from __future__ import annotations

import os
import sys


class EnvironmentProblem(Exception):  # noqa: N818  it is a state of the machine, and public under this name
    """Something in the environment keeps torch or torch_npu from importing.

    `problem` is one sentence, `cure` one shell command. Print both; a stack trace adds nothing.
    """

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(f"{problem}\n  cure: {cure}")
        self.problem = problem
        self.cure = cure


def cannopy_command(arguments: str, *, absolute: bool = False) -> str:
    """A shell command that runs `cannopy ARGUMENTS` with the interpreter in use.

    `absolute` spells out the path even when the shell would find it, as sudo needs.
    """
    scripts = os.path.dirname(sys.executable)
    if not os.path.exists(os.path.join(scripts, "cannopy")):
        return f"{sys.executable} -m cannopy {arguments}"
    first = next((p for p in os.environ.get("PATH", "").split(":") if os.path.exists(f"{p}/cannopy")), None)
    return f"cannopy {arguments}" if first == scripts and not absolute else f"{scripts}/cannopy {arguments}"


def pip_install(requirements: str, python: str | None = None) -> str:
    """A shell command that installs `requirements` for `python` (default: the interpreter in use)."""
    return f"{python or sys.executable} -m pip install {requirements}"
