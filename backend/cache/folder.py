"""The cache folder: where it is, who may write in it, and files that are on disk when a function returns."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from cannopy.backend.emit import identifier

TMP, ASIDE, TRASH, LOCK, WEIGHTS = ".tmp-", ".aside-", ".trash-", ".lock-", ".weights-"
HIDDEN = (TMP, ASIDE, TRASH, LOCK, WEIGHTS)
"""Beginnings of names that are no entries: being written, set aside, being removed, locks, derived weights."""
_ENTRY = re.compile(r"[A-Za-z_][0-9A-Za-z_]*-[0-9a-f]{16}")
_LEFT = re.compile(rf"({'|'.join(map(re.escape, (TMP, ASIDE, TRASH, LOCK)))}){_ENTRY.pattern}(-[-0-9a-f]*)?")


class CacheFolderError(PermissionError):
    """The folder could be written by somebody else; code from it would be executed."""


class NoFolderError(OSError):
    """There is no folder to use: no home, or a ``~user`` that does not exist."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/cannopy`` or ``~/.cache/cannopy``. `NoFolderError` where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "cannopy"
    try:
        return Path.home() / ".cache" / "cannopy"
    except RuntimeError as e:
        raise NoFolderError(f"the default folder is unknown: {e}; pass cache_dir or set XDG_CACHE_HOME") from e


def absolute(cache_dir: Path | str | None) -> Path:
    """The folder that ``cache_dir`` stands for, ``~`` expanded; it need not exist. `NoFolderError`."""
    if cache_dir is None:
        return default_cache_dir()
    try:
        return Path(os.path.abspath(Path(cache_dir).expanduser()))
    except RuntimeError as e:
        raise NoFolderError(f"{cache_dir}: {e}") from e


def resolve_dir(cache_dir: Path | str | None) -> Path:
    """The absolute folder, made with mode 0700 if absent. `CacheFolderError`, `NoFolderError`, OSError."""
    path = absolute(cache_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    problem = not_private(path.stat())
    if problem:
        raise CacheFolderError(
            f"compile cache {path} {problem}: compiled code is executed, so nobody else may write there;"
            f" {'pass another cache_dir' if 'belongs' in problem else 'chmod go-w it, or pass another cache_dir'}"
        )
    return path


def not_private(info: os.stat_result) -> str:
    """Why somebody else could have written this file or folder; "" when only this user could."""
    if info.st_uid != os.getuid():
        return f"belongs to uid {info.st_uid}, this process has uid {os.getuid()}"
    if info.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        who = "everybody" if info.st_mode & stat.S_IWOTH else "its group"
        return f"can be written by {who} (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def entry_path(cache_dir: Path, model_class: str, key: str) -> Path:
    """Where the entry with `key` stands."""
    return cache_dir / f"{identifier(model_class)}-{key[:16]}"


def is_entry(name: str) -> bool:
    """Whether an entry can have this name; whatever else is in the folder belongs to somebody else."""
    return not name.startswith(HIDDEN) and _ENTRY.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Whether a writer of an entry can have left a file or folder of this name."""
    return _LEFT.fullmatch(name) is not None


def without_prefix(name: str) -> str:
    """The name of the entry, with what follows it, in the name of something that is no entry."""
    return next((name.removeprefix(p) for p in HIDDEN if name.startswith(p)), name)


def lock_path(entry: Path) -> Path:
    """The file that is locked while `entry` is being built."""
    return entry.with_name(f"{LOCK}{entry.name}")


def write_private(path: Path, data: bytes) -> None:
    """A new file of mode 0600, on disk when this returns; folders above it are made with mode 0700."""
    missing = [p for p in path.parents if not p.exists()]
    for parent in reversed(missing):  # `parents=True` would leave all but the last to the umask
        parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Names in the folder are on disk when this returns, where the file system can do that for folders."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
