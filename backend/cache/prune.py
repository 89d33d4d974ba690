"""Removing entries. What a process reads or runs is left alone, whatever was asked for."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cannopy.backend.cache import lock, weight_sets
from cannopy.backend.cache.folder import LOCK, TMP, TRASH, absolute, is_leftover, without_prefix
from cannopy.backend.cache.listing import Entry, list_entries, size_of, stale, verify
from cannopy.backend.cache.manifest import MANIFEST

LEFTOVER_AGE = 24 * 3600.0
"""Seconds after which an unfinished or set-aside entry is taken for abandoned."""


@dataclass(frozen=True)
class Wanted:
    """Which entries are to go; an entry goes when one of these says so. Ages are in seconds, sizes in bytes.

    ``older_than``: made longer ago. ``unused_for``: made and last loaded longer ago. ``max_bytes``: those loaded least
    recently, until the rest is no larger. ``stale``: of other versions of Python, torch, torch_npu, CANN, transformers
    or this package. ``bad``: with files that are not what the manifest says. ``keep``: the newest so many stay in any
    case. ``old_weights``: no entry, but of the sets of derived weights that an entry has all except the last one used.
    """

    older_than: float | None = None
    unused_for: float | None = None
    max_bytes: int | None = None
    stale: bool = False
    bad: bool = False
    keep: int = 0
    old_weights: bool = False


@dataclass(frozen=True)
class Removal:
    """One thing that went or, in a dry run, would go. ``kept`` is "" or why it had to stay."""

    path: Path
    bytes: int
    why: str
    kept: str = ""


def prune(cache_dir: Path | str | None = None, *, older_than: float = 0.0, keep: int = 0) -> list[Path]:
    """Remove entries made more than `older_than` seconds ago except the `keep` newest, and old leftovers."""
    return [r.path for r in remove(cache_dir, Wanted(older_than=older_than, keep=keep)) if not r.kept]


def remove(cache_dir: Path | str | None, wanted: Wanted, *, dry_run: bool = False) -> list[Removal]:
    """Carry out `wanted` and take away leftovers older than a day. OSError when the folder cannot be written.

    An entry is renamed before its files go, so that a reader sees all of it or none; an entry in use stays. Its
    derived weights go with it.
    """
    root = absolute(cache_dir)
    if not root.is_dir():
        return []
    entries = verify(root) if wanted.bad else list_entries(root)
    done = []
    for entry, why in _doomed(entries, wanted):
        done.append(Removal(entry.path, entry.bytes, why, "" if dry_run and not entry.in_use else
                            "in use" if entry.in_use else _take_away(entry.path)))
    if wanted.old_weights:
        for one in (s for e in entries for s in weight_sets.sets(e.path)[1:]):
            kept = "" if dry_run else weight_sets.remove(one.path)
            done.append(Removal(one.path, one.bytes, "weights of other values were used later", kept))
    for path in weight_sets.orphans(root):
        size = size_of(path)
        done.append(Removal(path, size, "its entry is gone", "" if dry_run else weight_sets.remove_folder(path)))
    for path, why in _leftovers(root):
        done.append(Removal(path, 0, why, "" if dry_run else _take_away(path)))
    return done


def sweep(entry: Path) -> None:
    """Take away what killed writers of `entry` have left; for who has its build lock. Never raises."""
    with contextlib.suppress(OSError):
        for path in entry.parent.glob(f"{TMP}{entry.name}-*"):
            if (path / MANIFEST).exists():  # before that its writer may be between two lines
                _take_away(path)


def _doomed(entries: Sequence[Entry], wanted: Wanted) -> Iterator[tuple[Entry, str]]:
    now = time.time()
    rest = []
    for entry in entries[wanted.keep :]:
        why = _why(entry, wanted, now)
        if why:
            yield entry, why
        else:
            rest.append(entry)
    if wanted.max_bytes is None:
        return
    total = sum(e.bytes for e in entries[: wanted.keep]) + sum(e.bytes for e in rest)
    for entry in sorted(rest, key=lambda e: e.used):
        if total <= wanted.max_bytes:
            return
        yield entry, "least recently used"
        total -= 0 if entry.in_use else entry.bytes


def _why(entry: Entry, wanted: Wanted, now: float) -> str:
    if wanted.older_than is not None and max(now - entry.created, 0) >= wanted.older_than:
        return f"made {_days(now - entry.created)} ago"
    if wanted.unused_for is not None and max(now - entry.used, 0) >= wanted.unused_for:
        return f"not loaded for {_days(now - entry.used)}"
    if wanted.bad and entry.problem:
        return entry.problem
    differing = stale(entry) if wanted.stale else []
    if differing:
        return ", ".join(differing)
    return entry.problem or "" if wanted.stale and entry.fingerprint is None else ""


def _days(seconds: float) -> str:
    return f"{max(seconds, 0) / 86400:.1f} days"


def _leftovers(root: Path) -> Iterator[tuple[Path, str]]:
    now = time.time()
    for path in sorted(root.iterdir()):
        if is_leftover(path.name):
            with contextlib.suppress(OSError):
                if now - os.lstat(path).st_mtime >= LEFTOVER_AGE:
                    yield path, "left by a process that has ended"


def _take_away(path: Path) -> str:
    """Remove a folder or a lock file that nobody uses; why it stays, or ""."""
    if path.name.startswith(LOCK):
        with lock.unused(path) as free:
            if free:
                path.unlink(missing_ok=True)
            return "" if free else "in use"
    trash = path.with_name(f"{TRASH}{without_prefix(path.name)}-{secrets.token_hex(4)}")
    with lock.unused(path / MANIFEST) as free:
        if not free:
            return "in use"
        try:
            with lock.mutex(path.parent):
                path.rename(trash)
        except FileNotFoundError:
            return "removed by another process"
        if trash.is_symlink() or not trash.is_dir():
            trash.unlink()
        else:
            shutil.rmtree(trash)
        with contextlib.suppress(OSError):
            weight_sets.remove_folder(weight_sets.folder_of(path))
    return ""

