"""What is in a compile cache: every entry with its size, age, uses and state."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cannopy.backend.artifact import Fingerprint
from cannopy.backend.cache import key, lock, manifest, store, weight_sets
from cannopy.backend.cache.folder import absolute, is_entry
from cannopy.backend.cache.manifest import MANIFEST, CorruptError


@dataclass(frozen=True)
class Entry:
    """One published compilation, as listed.

    ``bytes`` are those on disk, ``weight_bytes`` of them those of the ``weight_sets`` sets of derived weights;
    ``created`` and ``used`` (the last hit, or `created`) are seconds since the epoch; ``hits`` counts the processes
    that loaded it, ``in_use`` says that one runs now. ``problem`` is None when its files are what its manifest says,
    as far as they were looked at.
    """

    path: Path
    model_class: str
    method: str
    key: str
    bytes: int
    created: float
    problem: str | None = None
    phase: str = ""
    hits: int = 0
    used: float = 0.0
    in_use: bool = False
    weight_sets: int = 0
    weight_bytes: int = 0
    fingerprint: Fingerprint | None = field(default=None, repr=False, compare=False)


def list_entries(cache_dir: Path | str | None = None) -> list[Entry]:
    """Every published entry, newest first; of its files only the manifest is checked."""
    return [_entry(p, verify=False) for p in _paths(absolute(cache_dir))]


def verify(cache_dir: Path | str | None = None) -> list[Entry]:
    """Every published entry with its files checked; bad ones have a `problem` and stay where they are."""
    return [_entry(p, verify=True) for p in _paths(absolute(cache_dir))]


def stale(entry: Entry) -> list[str]:
    """Why no process of this installation can hit the entry: ``torch 2.12.0 -> 2.13.0``; [] if one can."""
    if entry.fingerprint is None:
        return []
    now = {"versions": key.versions(), "package": {"package": key.package_digest()}}
    lines = []
    for name, items in now.items():
        stored = entry.fingerprint.details.get(name, {})
        for item in sorted(stored):
            if item == "cann" and not items.get(item):  # a host lowers for the version that the target has
                continue
            found = items.get(item, _installed(item))
            if found != stored[item]:
                lines.append(f"{item if item != 'package' else 'source of cannopy'} {stored[item]} -> {found}")
    return lines


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _paths(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if is_entry(p.name) and p.is_dir()]
    return sorted(found, key=store.made_at, reverse=True)


def _entry(path: Path, *, verify: bool) -> Entry:
    problem = None
    body: Mapping[str, Any] = {}
    identity = None
    try:
        body = manifest.parse((path / MANIFEST).read_bytes())
        identity = manifest.fingerprint(body)
        if verify or path.is_symlink():
            store.read_entry(path)
            problem = "; ".join(weight_sets.problems(path)) or None
    except store.MovedError:
        problem = "removed meanwhile"
    except FileNotFoundError as e:
        problem = f"{Path(e.filename).name} is missing"
    except (OSError, CorruptError) as e:
        problem = str(e)
    hits, used = _uses(path)
    created = store.made_at(path)
    kept = weight_sets.sets(path)
    weight_bytes = sum(s.bytes for s in kept)
    with lock.unused(path / MANIFEST) as free:
        in_use = not free
    return Entry(
        path=path, model_class=body.get("model_class", ""), method=body.get("method", ""),
        key=identity.key if identity else "", bytes=size_of(path) + weight_bytes, created=created, problem=problem,
        phase=identity.details.get("options", {}).get("phase", "") if identity else "",
        hits=hits, used=max(used, created), in_use=in_use, fingerprint=identity,
        weight_sets=len(kept), weight_bytes=weight_bytes,
    )


def size_of(path: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _uses(path: Path) -> tuple[int, float]:
    try:
        info = os.lstat(path / store.USES)
    except OSError:
        return 0, 0.0
    return info.st_size, info.st_mtime
