"""What a torch_npu wheel asks of CANN: libraries to load, functions to link, functions to look up by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .elf import SharedObject
from .manifest import MANIFEST_NAME
from .wheel import Wheel

# Names handed to dlsym are only in the read-only strings. aclnn* (the operators of libopapi, some
# 2,000) are left out: they are reached from a kernel launch on a device, and there is none.
_LOOKED_UP = re.compile(rb"(acl(?!nn)|rt(?=[A-Z])|Hccl|Hcomm|Msprof|mstx)[A-Za-z0-9]*[A-Z][A-Za-z0-9]*")
_PYTHON = re.compile(r"_?Py[A-Z_]")

OPENED_BY_NAME = ("libopapi.so",)
"""Libraries that torch_npu hands to dlopen without any of its files needing them.

The other names it may open (profilers, dcmi, shmem, lcal, custom operator packages) are optional
features that switch themselves off when absent, which is the truth on a host, so they stay absent.
"""

_ASK_LOADER = """
import ctypes, json, sys
libraries, symbols = json.load(sys.stdin)
found, handles = [], [ctypes.CDLL(None)]
for name in libraries:
    try:
        handles.append(ctypes.CDLL(name))
        found.append(name)
    except OSError:
        pass
json.dump([found, [s for s in symbols if any(hasattr(h, s) for h in handles)]], sys.stdout)
"""


@dataclass(frozen=True)
class Wanted:
    """The gap between a wheel and the machine: library file names and symbol names."""

    libraries: frozenset[str]
    symbols: frozenset[str]


def shared_objects(package: Path) -> list[Path]:
    """Every ELF shared object below a package, in a fixed order."""
    found = []
    for path in sorted(package.rglob("*.so*")):
        if path.is_file():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    found.append(path)
    return found


def missing_libraries(wheel: Wheel) -> set[str]:
    """NEEDED entries of the wheel that neither the wheel, torch nor the system provides.

    Reads the dynamic sections only (0.1 s). The stand-in's own folder is not consulted.
    """
    needed = _needed_from_outside(shared_objects(wheel.package), wheel)
    found, _ = _system_has(needed, ())
    return needed - found


def wanted(wheel: Wheel) -> Wanted:
    """All that a stand-in for `wheel` has to have. Reads the symbol tables (2 s for torch_npu 2.13)."""
    own = shared_objects(wheel.package)
    symbols: set[str] = set()
    for path in own:
        with SharedObject(path) as library:
            symbols |= library.unversioned_imports() | library.strings(_LOOKED_UP)
    symbols = {name for name in symbols if not _PYTHON.match(name)}
    for path in [*own, *shared_objects(wheel.torch_package / "lib")]:
        with SharedObject(path) as library:
            symbols -= library.defines(symbols)
    needed = _needed_from_outside(own, wheel)
    # dlopen, pthread_create and their like come unversioned too; the loader knows who has them.
    found, resolved = _system_has(needed, symbols)
    return Wanted(frozenset(needed - found) | set(OPENED_BY_NAME), frozenset(symbols - resolved))


def _needed_from_outside(own: list[Path], wheel: Wheel) -> set[str]:
    needed: set[str] = set()
    for path in own:
        with SharedObject(path) as library:
            needed.update(library.dynamic().needed)
    inside = {p.name for p in own} | {p.name for p in (wheel.torch_package / "lib").glob("*.so*")}
    return needed - inside


def _system_has(libraries: Iterable[str], symbols: Iterable[str]) -> tuple[set[str], set[str]]:
    """Which libraries the dynamic loader finds, and which symbols those, glibc or Python resolve.

    Asked in a fresh process: only the loader knows its whole search order, and a process that has
    torch_npu loaded already would answer from memory.
    """
    environment = dict(os.environ)
    paths = environment.pop("LD_LIBRARY_PATH", "").split(":")
    paths = [p for p in paths if p and not Path(p, MANIFEST_NAME).exists()]
    if paths:
        environment["LD_LIBRARY_PATH"] = ":".join(paths)
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _ASK_LOADER],
        input=json.dumps([sorted(libraries), sorted(symbols)]),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    found, resolved = json.loads(answer.stdout)
    return set(found), set(resolved)
