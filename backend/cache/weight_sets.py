"""Results of weight plans on disk, one set per values of weights: ``.weights-<entry>/<digest>.safetensors``.

The digest covers the key of the entry, the recipes and the values of what they read, so a set is right for every model
that has it. A set appears by one rename and is never changed. Nothing is lost with one: it is made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cannopy.backend.cache import lock, store, tensors_file
from cannopy.backend.cache.folder import TMP, WEIGHTS, is_entry, sync_folder
from cannopy.backend.cache.manifest import CorruptError

logger = logging.getLogger("cannopy.backend")

_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_WRITING = 60.0
"""Seconds after which an unfinished file that nobody has locked is taken for abandoned."""


@dataclass(frozen=True)
class WeightSet:
    """One set on disk. ``used``: when it was last loaded or made, in seconds since the epoch."""

    path: Path
    bytes: int
    used: float


def folder_of(entry: Path) -> Path:
    """Where the sets of ``entry`` are."""
    return entry.with_name(f"{WEIGHTS}{entry.name}")


def load(entry: Path, digest: str) -> dict[str, torch.Tensor]:
    """The weights of a set, mapped and verified; {} when there is none or it cannot be used.

    The set is in use while one of the tensors is there. A bad one is removed with a warning.
    """
    path = folder_of(entry) / f"{digest[:32]}.safetensors"
    try:
        with store.opened_folder(path.parent) as folder:
            return _load(folder, path)
    except (store.MovedError, FileNotFoundError):
        return {}
    except (OSError, CorruptError) as e:
        problem, bad = str(e), isinstance(e, CorruptError)
    logger.warning("compile cache: %s is not usable (%s); its weights are derived again", path, problem)
    if bad:  # out of the except clause, whose error keeps the map and with it the lock
        _remove(path)
    return {}


def _load(folder: int, path: Path) -> dict[str, torch.Tensor]:
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise store.bad(e, "it", "is no file") from e
    use = lock.Use.take(fd)
    if use is None:
        os.close(fd)
        return {}
    try:
        store.private(fd, "it")
        found, mapped = tensors_file.read(fd)
    except BaseException:
        use.close()
        raise
    mapped.use = use
    with contextlib.suppress(OSError):
        os.utime(fd)
    return found


def publish(entry: Path, digest: str, tensors: Iterable[tuple[str, torch.Tensor]], names: Iterable[str]) -> None:
    """Write a set beside ``entry``; nothing is left when that fails. OSError."""
    folder = folder_of(entry)
    folder.mkdir(mode=0o700, exist_ok=True)
    final = folder / f"{digest[:32]}.safetensors"
    with _in_folder(folder):
        _sweep(folder)
        if os.path.lexists(final):
            return
        staging = folder / f"{TMP}{digest[:32]}-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        use = lock.Use.take(fd)
        try:
            if use is None:
                os.close(fd)
                raise OSError(f"{staging} was removed by another process")
            if tensors_file.write(fd, tensors, names):
                staging.rename(final)
                sync_folder(folder)
        finally:
            staging.unlink(missing_ok=True)
            if use is not None:
                use.close()


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """OSError for a folder of sets that somebody else could write, or that is a link."""
    try:
        with store.opened_folder(folder):
            yield
    except (store.MovedError, CorruptError) as e:
        raise OSError(f"{folder}: {e}") from e


def sets(entry: Path) -> list[WeightSet]:
    """The sets of ``entry``, those used last first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder_of(entry).iterdir():
            info = os.lstat(path)
            if _NAME.fullmatch(path.name) and stat.S_ISREG(info.st_mode):
                found.append(WeightSet(path, info.st_size, info.st_mtime))
    return sorted(found, key=lambda s: s.used, reverse=True)


def problems(entry: Path) -> list[str]:
    """What is wrong with the sets of ``entry``, every byte of them read."""
    found = []
    for one in sets(entry):
        try:
            with store.opened_folder(one.path.parent), open(one.path, "rb") as f:
                store.private(f.fileno(), "it")
                tensors_file.read(f.fileno())
        except (OSError, store.MovedError):
            continue
        except CorruptError as e:
            found.append(f"kept weights {one.path.name}: {e}")
    return found


def remove(path: Path) -> str:
    """Remove a set; why it stays, or ""."""
    with lock.unused(path) as free:
        if not free:
            return "in use"
        path.unlink(missing_ok=True)
    return ""


def remove_folder(folder: Path) -> str:
    """Remove a folder with all its sets; why something stays, or ""."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return ""
    kept = [why for path in sorted(folder.iterdir()) if (why := remove(path))]
    if kept:
        return kept[0]
    with contextlib.suppress(OSError):
        folder.rmdir()
    return ""


def orphans(root: Path) -> list[Path]:
    """Folders of sets whose entry is gone."""
    found = ((p, p.name.removeprefix(WEIGHTS)) for p in sorted(root.glob(f"{WEIGHTS}*")))
    return [p for p, entry in found if is_entry(entry) and not p.with_name(entry).is_dir()]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        remove(path)


def _sweep(folder: Path) -> None:
    """Take away what killed writers have left."""
    for path in folder.glob(f"{TMP}*"):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(path).st_mtime > _WRITING:
                remove(path)
