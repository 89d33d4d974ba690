"""The compile cache on disk: ``<cache_dir>/<model class>-<key[:16]>/``.

An entry appears by one rename and never changes afterwards. Readers verify every byte before they use it. A corrupt
entry is renamed away, so that a process which still reads it is not disturbed; `prune` removes such leftovers later.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cannopy.backend.artifact import Artifact, Fingerprint
from cannopy.backend.cache import manifest
from cannopy.backend.cache.key import differences
from cannopy.backend.cache.manifest import MANIFEST, TORCHAIR, CorruptError
from cannopy.backend.emit import identifier

logger = logging.getLogger("cannopy.backend")

_HIDDEN = (".tmp-", ".aside-", ".trash-")
_NEAREST = 32
LEFTOVER_AGE = 24 * 3600.0
"""Seconds after which `prune` takes an unfinished or set-aside entry for abandoned."""


class CacheFolderError(PermissionError):
    """The folder could be written by somebody else; code from it would be executed."""


@dataclass(frozen=True)
class Entry:
    """One published compilation, as listed. ``problem`` is None when its files are what its manifest says."""

    path: Path
    model_class: str
    method: str
    key: str
    bytes: int
    created: float
    problem: str | None = None


@dataclass(frozen=True)
class Content:
    """An entry in memory, verified: the manifest and the bytes of every other file."""

    body: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Found:
    """Result of a look-up. ``content`` is there on a hit only; ``inode`` is that of the folder that was read."""

    status: Literal["hit", "miss", "corrupt"]
    path: Path
    reason: str
    content: Content | None = None
    inode: int = 0


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/cannopy`` or ``~/.cache/cannopy``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cannopy"


def resolve_dir(cache_dir: Path | str | None) -> Path:
    """The absolute folder, ``~`` expanded; made with mode 0700 if absent. `CacheFolderError`, OSError."""
    path = Path(os.path.abspath(Path(cache_dir).expanduser())) if cache_dir is not None else default_cache_dir()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)
    return path


def check_owner(path: Path) -> None:
    """`CacheFolderError` unless the folder is ours and closed to the world for writing."""
    info = path.stat()
    if info.st_uid != os.getuid():
        raise CacheFolderError(
            f"compile cache {path} belongs to uid {info.st_uid}, this process has uid {os.getuid()}:"
            " compiled code is executed, so it must be your own folder; pass another cache_dir"
        )
    if info.st_mode & stat.S_IWOTH:
        raise CacheFolderError(
            f"compile cache {path} of uid {info.st_uid} can be written by everybody (mode"
            f" {stat.S_IMODE(info.st_mode):o}): compiled code is executed; chmod o-w it or pass another cache_dir"
        )


def entry_path(cache_dir: Path, model_class: str, key: str) -> Path:
    """Where the entry with `key` stands."""
    return cache_dir / f"{identifier(model_class)}-{key[:16]}"


def find(cache_dir: Path, model_class: str, fingerprint: Fingerprint) -> Found:
    """The entry of `fingerprint`, verified and read into memory, or why there is none."""
    path = entry_path(cache_dir, model_class, fingerprint.key)
    reason, inode = "", 0
    for _ in range(3):  # an entry can appear, or be replaced, between two steps of a reading
        try:
            inode = path.stat().st_ino
            check_owner(path)
            content = read_entry(path)
        except FileNotFoundError as e:
            if not path.exists():
                return Found("miss", path, miss_reason(cache_dir, model_class, fingerprint))
            reason = f"{Path(e.filename).name} is missing"
        except (CorruptError, CacheFolderError, NotADirectoryError, IsADirectoryError) as e:
            return Found("corrupt", path, str(e), inode=inode)
        else:
            if manifest.fingerprint(content.body).key != fingerprint.key:
                return Found("corrupt", path, "the manifest is of another key", inode=inode)
            return Found("hit", path, "", content, inode)
    return Found("corrupt", path, reason, inode=inode)


def read_entry(path: Path) -> Content:
    """An entry, verified. `CorruptError`, FileNotFoundError."""
    body = manifest.parse((path / MANIFEST).read_bytes())
    files = {name: manifest.checked(body, name, (path / name).read_bytes()) for name in body["files"]}
    return Content(body, files)


def miss_reason(cache_dir: Path, model_class: str, fingerprint: Fingerprint) -> str:
    """What differs from the entry of the same model class that differs least."""
    best: list[str] | None = None
    candidates = sorted(cache_dir.glob(f"{identifier(model_class)}-*"), key=_changed_at, reverse=True)
    for path in candidates[:_NEAREST]:
        try:
            other = manifest.fingerprint(manifest.parse((path / MANIFEST).read_bytes()))
        except (OSError, CorruptError):
            continue
        lines = differences(other, fingerprint)
        if best is None or len(lines) < len(best):
            best = lines
    return f"changed: {', '.join(best)}" if best else f"no entry for {model_class} in {cache_dir}"


def publish(artifact: Artifact, torchair_files: Mapping[str, Path], log: list[str], cache_dir: Path) -> Path:
    """Write the entry beside its place and rename it there. Another process's valid entry is left as it is.

    Raises OSError when the folder cannot be written and `NotCacheableError`; nothing is left behind then.
    """
    final = entry_path(cache_dir, artifact.model_class, artifact.fingerprint.key)
    files = manifest.own_files(artifact, log)
    files |= {f"{TORCHAIR}/{name}": path.read_bytes() for name, path in torchair_files.items()}
    files[MANIFEST] = manifest.dump(artifact, files)
    staging = cache_dir / f".tmp-{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        for name, data in files.items():
            write_private(staging / name, data)
        _rename_into_place(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def write_private(path: Path, data: bytes) -> None:
    """A new file of mode 0600, on disk when this returns."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def set_aside(path: Path, reason: str, inode: int) -> None:
    """Rename a bad entry out of the way, if the folder with `inode` is still there and not already replaced."""
    try:
        if path.stat().st_ino != inode:
            return
        path.rename(path.with_name(f".aside-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"))
    except FileNotFoundError:
        return
    logger.warning("compile cache: %s set aside (%s)", path, reason)


def list_entries(cache_dir: Path | str | None = None) -> list[Entry]:
    """Every published entry, newest first; files are not verified."""
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    paths = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(_HIDDEN)] if root.is_dir() else []
    return [_entry(p, verify=False) for p in sorted(paths, key=_changed_at, reverse=True)]


def verify(cache_dir: Path | str | None = None) -> list[Entry]:
    """Every published entry with its files checked; bad ones have a `problem` and stay where they are."""
    return [_entry(e.path, verify=True) for e in list_entries(cache_dir)]


def prune(cache_dir: Path | str | None = None, *, older_than: float = 0.0, keep: int = 0) -> list[Path]:
    """Remove entries made more than `older_than` seconds ago except the `keep` newest, and old leftovers.

    Returns what was removed. An entry is renamed before its files go, so a reader sees all of it or none.
    """
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    now = time.time()
    doomed = [e.path for e in list_entries(root)[keep:] if now - e.created >= older_than]
    if root.is_dir():
        leftovers = [p for p in root.iterdir() if p.name.startswith(_HIDDEN)]
        doomed += [p for p in leftovers if now - _changed_at(p) >= LEFTOVER_AGE]
    removed = []
    for path in doomed:
        trash = root / f".trash-{path.name.lstrip('.')}-{secrets.token_hex(4)}"
        try:
            path.rename(trash)
        except FileNotFoundError:
            continue
        shutil.rmtree(trash)
        removed.append(path)
    return removed


def _rename_into_place(staging: Path, final: Path) -> None:
    for _ in range(8):
        try:
            staging.rename(final)
            return
        except (FileExistsError, NotADirectoryError):
            pass
        except OSError as e:
            if not final.exists():
                raise
            logger.debug("compile cache: %s is taken (%s)", final, e)
        inode = 0
        try:
            inode = final.stat().st_ino
            read_entry(final)
            return  # somebody published the same compilation first
        except FileNotFoundError as e:
            set_aside(final, f"{Path(e.filename).name} is missing", inode)
        except (CorruptError, NotADirectoryError, IsADirectoryError) as e:
            set_aside(final, str(e), inode)
    raise OSError(f"could not publish {final}: its place was taken eight times by entries that are not valid")


def _entry(path: Path, *, verify: bool) -> Entry:
    problem = None
    body: Mapping[str, Any] = {}
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    try:
        body = manifest.parse((path / MANIFEST).read_bytes())
        if verify:
            read_entry(path)
    except FileNotFoundError as e:
        problem = f"{Path(e.filename).name} is missing"
    except (OSError, CorruptError) as e:
        problem = str(e)
    key = body["fingerprint"]["key"] if body else ""
    return Entry(path, body.get("model_class", ""), body.get("method", ""), key, size, _changed_at(path), problem)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
