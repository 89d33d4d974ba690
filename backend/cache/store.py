"""The compile cache on disk: ``<cache_dir>/<model class>-<key[:16]>/``. Reading.

An entry appears by one rename and never changes afterwards (`cannopy.backend.cache.publish`). Readers verify every byte
before they use it, and read through descriptors, so that an entry which is renamed away meanwhile stays readable. A
corrupt entry is renamed away, not deleted; `cannopy.backend.cache.prune` removes such leftovers later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cannopy.backend.artifact import Fingerprint
from cannopy.backend.cache import lock, manifest
from cannopy.backend.cache.folder import ASIDE, entry_path, not_private
from cannopy.backend.cache.key import differences
from cannopy.backend.cache.manifest import CONSTANTS, LOG, MANIFEST, SOURCE, TORCHAIR, CorruptError
from cannopy.backend.emit import identifier

logger = logging.getLogger("cannopy.backend")

USES = "uses"
"""A file in an entry that grows by one byte per hit. It is not part of what is stored."""
_NEAREST = 32
_ATTEMPTS = 25
_PAUSE = 0.02


class MovedError(Exception):
    """The entry was renamed or is being removed while it was opened."""


@dataclass(frozen=True)
class Content:
    """An entry in memory, verified: the manifest and the bytes of every other file."""

    body: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Found:
    """Result of a look-up.

    ``content`` and ``use`` (a lock that keeps `prune` away) are there on a hit only; ``inode`` is that of what stands
    at ``path``.
    """

    status: Literal["hit", "miss", "corrupt"]
    path: Path
    reason: str
    content: Content | None = None
    inode: int = 0
    use: lock.Use | None = None


def find(cache_dir: Path, model_class: str, fingerprint: Fingerprint) -> Found:
    """The entry of `fingerprint`, verified and read into memory, or why there is none."""
    path = entry_path(cache_dir, model_class, fingerprint.key)
    for _ in range(_ATTEMPTS):  # an entry can appear, be replaced or be removed between two steps of a reading
        try:
            inode = os.lstat(path).st_ino
        except FileNotFoundError:
            return Found("miss", path, miss_reason(cache_dir, model_class, fingerprint))
        try:
            content, use = _read_for_use(path)
        except MovedError:
            time.sleep(_PAUSE)
            continue
        except CorruptError as e:
            return Found("corrupt", path, str(e), inode=inode)
        if content.body["fingerprint"]["key"] != fingerprint.key:
            use.close()
            return Found("corrupt", path, "the manifest is of another key", inode=inode)
        return Found("hit", path, "", content, inode, use)
    return Found("miss", path, f"{path.name} is being removed by another process")


def read_entry(path: Path) -> Content:
    """An entry, verified. `CorruptError` says what is wrong with it, `MovedError` that it is gone."""
    with opened_folder(path) as folder, contextlib.closing(_Manifest(folder)) as opened:
        return _read(folder, opened.fd)


def _read_for_use(path: Path) -> tuple[Content, lock.Use]:
    """An entry and its use. `CorruptError`, `MovedError`."""
    with opened_folder(path) as folder:
        opened = _Manifest(folder)
        use = lock.Use.take(opened.fd)
        if use is None:
            opened.close()
            raise MovedError(path)
        try:
            if not _is_at(folder, path):
                raise MovedError(path)
            content = _read(folder, use.fd)
        except BaseException:
            use.close()
            raise
        _count_use(folder)
        return content, use


def use_of(path: Path) -> lock.Use | None:
    """The use of the entry at `path`, unread; None when it is not there or being removed."""
    with contextlib.suppress(OSError):
        fd = os.open(path / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        use = lock.Use.take(fd)
        if use is None:
            os.close(fd)
        return use
    return None


class _Manifest:
    """The opened manifest of an entry."""

    def __init__(self, folder: int) -> None:
        self.fd = _open_below(folder, MANIFEST)

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """A descriptor of the entry's folder, which must be ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise MovedError(path) from e
    except OSError as e:
        raise bad(e, "it", "is a file or a link, no folder") from e
    try:
        private(fd, "its folder", stat.S_ISDIR)
        yield fd
    finally:
        os.close(fd)


def _read(folder: int, manifest_fd: int) -> Content:
    private(manifest_fd, MANIFEST)
    body = manifest.parse(_all_bytes(manifest_fd))
    manifest.fingerprint(body)
    names = body.get("files")
    if not isinstance(names, dict) or not all(map(_known_name, names)):
        raise CorruptError(f"{MANIFEST} lists files that no entry has")
    return Content(body, {name: manifest.checked(body, name, _file(folder, name)) for name in names})


def _known_name(name: str) -> bool:
    """Whether an entry can have this file; no name leads out of the folder."""
    first, *rest = name.split("/")
    if first == TORCHAIR:
        return bool(rest) and all(part not in ("", ".", "..") for part in rest)
    return not rest and first in (SOURCE, CONSTANTS, LOG)


def _file(folder: int, name: str) -> bytes:
    fd = _open_below(folder, name)
    try:
        private(fd, name)
        return _all_bytes(fd)
    finally:
        os.close(fd)


def _open_below(folder: int, name: str) -> int:
    """Open ``a/b/c`` for reading, following no symbolic link on the way. `CorruptError`."""
    *parents, last = name.split("/")
    at, opened = folder, []
    try:
        for part in parents:
            at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            opened.append(at)
            private(at, f"the folder of {name}", stat.S_ISDIR)
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError as e:
        raise CorruptError(f"{name} is missing") from e
    except OSError as e:
        raise bad(e, name, "is no file") from e
    finally:
        for each in opened:
            os.close(each)
    return fd


def bad(error: OSError, name: str, otherwise: str) -> Exception:
    """What to raise when part of an entry cannot be opened; an error of the machine is raised as it is."""
    if error.errno == errno.ELOOP:
        return CorruptError(f"{name} is a symbolic link")
    if error.errno in (errno.ENOTDIR, errno.ENXIO):
        return CorruptError(f"{name} {otherwise}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return CorruptError(f"{name} cannot be read ({error.strerror})")
    return error


def private(fd: int, name: str, expected: Callable[[int], bool] = stat.S_ISREG) -> None:
    info = os.fstat(fd)
    if not expected(info.st_mode):
        raise CorruptError(f"{name} is no file")
    problem = not_private(info)
    if problem:
        raise CorruptError(f"{name} {problem}")


def _all_bytes(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    with os.fdopen(os.dup(fd), "rb") as f:
        f.seek(0)
        return f.read(size + 1)


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return there.st_ino == os.fstat(fd).st_ino


def _count_use(folder: int) -> None:
    with contextlib.suppress(OSError):  # a read-only cache counts nothing
        fd = os.open(USES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            os.write(fd, b".")
        finally:
            os.close(fd)


def miss_reason(cache_dir: Path, model_class: str, fingerprint: Fingerprint) -> str:
    """What differs from the entry of the same model class that differs least."""
    best: list[str] | None = None
    for path in _newest_first(cache_dir, identifier(model_class))[:_NEAREST]:
        try:
            other = manifest.fingerprint(read_manifest(path))
        except (OSError, CorruptError):
            continue
        lines = differences(other, fingerprint)
        if best is None or len(lines) < len(best):
            best = lines
    return f"changed: {', '.join(best)}" if best else f"no entry for {model_class} in {cache_dir}"


def read_manifest(path: Path) -> Mapping[str, Any]:
    """The manifest of the entry at `path`, checked against its own digest only. OSError, `CorruptError`."""
    return manifest.parse((path / MANIFEST).read_bytes())


def made_at(path: Path) -> float:
    """When the entry came to this folder, in seconds since the epoch; 0 if unknown."""
    for candidate in (path / MANIFEST, path):
        with contextlib.suppress(OSError):
            return os.lstat(candidate).st_mtime
    return 0.0


def set_aside(path: Path, reason: str, inode: int) -> None:
    """Rename a bad entry out of the way, if what has `inode` still stands there. A warning names it."""
    try:
        with lock.mutex(path.parent):
            move_aside(path, reason, inode)
    except OSError as e:
        logger.warning("compile cache: %s is not usable (%s) and could not be set aside (%s)", path, reason, e)


def move_aside(path: Path, reason: str, inode: int) -> None:
    """`set_aside` for who has the mutex. OSError."""
    aside = path.with_name(f"{ASIDE}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if os.lstat(path).st_ino != inode:
            return
        path.rename(aside)
    except FileNotFoundError:
        return
    logger.warning("compile cache: %s set aside as %s (%s)", path, aside.name, reason)


def _newest_first(cache_dir: Path, model_class: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(cache_dir.glob(f"{model_class}-*"), key=made_at, reverse=True)
    return []
