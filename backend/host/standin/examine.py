"""The checks behind `cannopy doctor`. Nothing here imports torch; the import test runs in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from .cann import demand_sane_variables, find_cann
from .compiler import compiler_cure, compiler_name, find_compiler
from .problem import EnvironmentProblem, cannopy_command, pip_install
from .requirements import REQUIREMENTS, Requirement
from .status import demand_platform, wheel_status
from .wheel import DEFAULT_RELEASE, Search, installed_version, locate, minor, release_of, torch_install

OLDEST_PYTHON = (3, 10)
IMPORT_TIMEOUT = 300
"""Seconds. The imports take 10 s on two busy cores with a warm disk."""

_IMPORT_TEST = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)  # torch_npu prints a warning to standard output while it is imported
import torch, torch_npu
from torch_npu.dynamo import torchair
import torchair.inference
found = {"npu": torch.npu.is_available(), "devices": torch.npu.device_count(),
         "ops": sum(s.name.startswith("npu::") for s in torch._C._jit_get_all_schemas())}
os.write(answer, json.dumps(found).encode())
"""

_TWO_DEVICES = re.compile(r"Duplicated key '(\w+)' found in device-specific configuration parser hook registration")
"""What torch says from 2.14 on when a second device registers an option of its memory allocator."""

State = Literal["ok", "optional", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of doctor: what was looked at, how it came out, and for a failure the command that cures it."""

    name: str
    state: State
    found: str
    cure: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain data that JSON takes."""
        return asdict(self)


def examine(*, import_test: bool = True) -> list[Check]:
    """Every check, in the order in which one would cure them."""
    search = Search.here()
    real_cann = find_cann() is not None
    cann = _tried("CANN", lambda: _cann(search))
    checks = [
        _python(),
        _tried("platform", _platform),
        _distribution("torch", search),
        _distribution("torch_npu", search),
        _versions_match(search),
        cann,
        _compiler(needed=cann.state == "failed" and not real_cann),
        *(_requirement(requirement, search, real_cann) for requirement in REQUIREMENTS),
        _transformers(search),
    ]
    if import_test:
        checks += _import_checks(next((check.cure for check in checks if check.state == "failed"), ""))
    return checks


def _tried(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", check())
    except EnvironmentProblem as error:
        return Check(name, "failed", error.problem, error.cure)


def _python() -> Check:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "failed", f"{found}; 3.10 or newer is needed", "python3.11 -m venv ~/cannopy")


def _platform() -> str:
    demand_platform()
    return f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"


def _distribution(name: str, search: Search) -> Check:
    """Present or not; which release to get is `locate`'s to say, as it knows the other of the pair."""
    version = installed_version(name, search.folders)
    if version is not None:
        return Check(name, "ok", version)
    try:
        locate(search)
    except EnvironmentProblem as error:
        if error.problem == f"{name} is not installed":
            return Check(name, "failed", "not installed", error.cure)
    return Check(name, "failed", "not installed", pip_install(name))


def _versions_match(search: Search) -> Check:
    name = "torch and torch_npu match"
    if None in (installed_version("torch", search.folders), installed_version("torch_npu", search.folders)):
        return Check(name, "optional", "not both are installed")
    return _tried(name, lambda: f"both {minor(locate(search).version)}")


def _cann(search: Search) -> str:
    """real, stand-in or none; none and a shadowed or unset-up CANN are failures."""
    standin = wheel_status(locate(search))
    cann = find_cann()
    if not standin.usable:
        kind = "real, hidden by the stand-in" if cann else "none"
        raise EnvironmentProblem(f"{kind}; the stand-in is {standin.state}: {standin.reason}", standin.cure)
    if cann is not None:
        cann.demand_loadable()
        return f"real ({cann.library})"
    demand_sane_variables()
    if standin.state == "installed":
        return f"stand-in ({len(standin.libraries)} libraries, {standin.symbols} functions)"
    return f"{standin.state}: {standin.reason}"


def _compiler(*, needed: bool) -> Check:
    command = find_compiler()
    if command is not None:
        return Check("C compiler", "ok", compiler_name(command))
    if not needed:
        return Check("C compiler", "optional", "none; only the stand-in is built with one")
    return Check("C compiler", "failed", "none (looked for $CC, cc, gcc, clang)", compiler_cure())


def _requirement(requirement: Requirement, search: Search, cann: bool) -> Check:
    name = requirement.distribution
    if requirement.present(search.folders):
        return Check(name, "ok", installed_version(name, search.folders) or "present")
    if requirement.with_cann_only and not cann:
        return Check(name, "optional", f"not installed; used by {requirement.used_by} only")
    return Check(name, "failed", f"not installed; {requirement.used_by} imports it", pip_install(name))


def _transformers(search: Search) -> Check:
    version = installed_version("transformers", search.folders)
    return Check("transformers", "ok" if version else "optional", version or "not installed; for Hugging Face models")


def _import_checks(known_cure: str) -> list[Check]:
    """The import test, with the last line of its error. A failure found before it explains it, so its cure is used."""
    name, device = "import torch, torch_npu, torchair", "NPU"
    command = [sys.executable, "-c", _IMPORT_TEST]
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return [Check(name, "failed", f"did not end within {IMPORT_TIMEOUT} s", f"{sys.executable} -c 'import torch'")]
    if done.returncode == 0:
        found = json.loads(done.stdout)
        text = f"{found['devices']} available" if found["npu"] else "none on this machine; graphs run on the host"
        return [
            Check(name, "ok", f"{found['ops']} npu op schemas"),
            Check(device, "ok" if found["npu"] else "optional", text),
        ]
    reason, cure = _import_error(done.stderr, done.returncode)
    return [Check(name, "failed", reason, known_cure or cure)]


def _import_error(stderr: str, code: int) -> tuple[str, str]:
    lines = [line for line in stderr.splitlines() if line and not line.startswith((" ", "[ERROR]"))]
    thrown = re.search(r"^ *what\(\): *(.+)$", stderr, re.MULTILINE)  # C++ ended the process; frames follow
    reason = thrown[1] if thrown else lines[-1] if lines else f"the process ended with code {code}"
    if (twice := _TWO_DEVICES.search(reason)) is not None:
        search = Search.here()
        release = release_of(installed_version("torch_npu", search.folders) or DEFAULT_RELEASE)
        reason = (f"torch_npu cannot be loaded beside a CUDA build of torch, as both register the allocator option "
                  f"{twice[1]!r}: the CPU build of torch {release} is needed")
        return reason, torch_install(f"{release}+cpu", search.python)
    if "No module named" in reason:
        module = reason.split("'")[1].split(".")[0]
        return reason, pip_install({"google": "protobuf", "yaml": "pyyaml"}.get(module, module))
    return reason, cannopy_command("host install --force")
