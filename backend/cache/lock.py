"""Locks of the compile cache. All are flock locks: the kernel ends them with the process that holds them.

=========  ===============================  =========================================================
lock       on                               held
=========  ===============================  =========================================================
build      ``.lock-<entry>``, exclusive     while a process builds the entry
use        the entry's manifest, shared     while a process reads the entry and while it runs what it read
mutex      the cache folder, exclusive      for the moment in which an entry is renamed
=========  ===============================  =========================================================

A file system without such locks (flock fails) is used without them: processes then build side by side, and renames
alone keep entries whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("cannopy.backend")

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL}
_POLL = 0.05
_FIRST_NEWS, _NEWS = 2.0, 30.0
"""Seconds until a waiter says that it waits, and between further lines."""
_MUTEX_PATIENCE = 30.0
"""Renames take milliseconds; a holder that keeps the mutex this long is stopped (SIGSTOP) and is not waited for."""

_held: dict[str, tuple[int, int]] = {}
"""Build locks of this process: path -> thread and descriptor."""


def _try_lock(fd: int, how: int) -> bool | None:
    """Whether the lock was got; None where the file system has no locks."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if e.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _forget_in_child() -> None:
    """A forked child does not build: were its copy of the descriptor open, the lock would outlive its holder."""
    for _, fd in _held.values():
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class BuildLock:
    """The right to build one entry. `release` says how it ended; it is released with the object or the process, too."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self._pid = os.getpid()
        _held[str(path)] = threading.get_ident(), fd
        self._finalizer = weakref.finalize(self, _close_build, str(path), fd, self._pid)

    def release(self, failure: str = "") -> None:
        """Let the next one in; ``failure`` is why nothing was published. Calling it again does nothing."""
        if not self._finalizer.alive or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            _write(self._fd, {"ended": True, "failure": failure})
            if _stands_at(self._fd, self._path):
                self._path.unlink()
        self._finalizer()


def _close_build(path: str, fd: int, pid: int) -> None:
    if os.getpid() == pid and _held.pop(path, None) is not None:
        os.close(fd)


@dataclass(frozen=True)
class Turn:
    """How waiting for a build lock ended.

    ``lock`` is there when the caller is to build alone. ``ended`` means that another process has just built the
    entry, so it should be looked up again. Otherwise the caller builds side by side and ``note`` says why.
    """

    lock: BuildLock | None = None
    ended: bool = False
    note: str = ""


def build_turn(path: Path, timeout: float) -> Turn:
    """Wait up to ``timeout`` seconds for the build lock at ``path``. Never raises for a folder that takes no locks."""
    if _held.get(str(path), (0, 0))[0] == threading.get_ident():
        return Turn()  # waiting for oneself has no end
    news = _News(timeout)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as e:
            return Turn(note=f"no lock: {e}")
        try:
            turn, keep = _wait(path, fd, news)
        except BaseException:
            os.close(fd)
            raise
        if not keep:
            os.close(fd)
        if turn is not None:
            return turn


def _wait(path: Path, fd: int, news: _News) -> tuple[Turn | None, bool]:
    """The turn, or None to open the file again; and whether the descriptor stays open."""
    while (got := _try_lock(fd, fcntl.LOCK_EX)) is False:
        holder = _read(fd)
        if news.too_late():
            return Turn(note=f"{_who(holder)} has not finished within {news.timeout:g} s; building side by side"), False
        news.tell(f"{_who(holder)} to build {path.name.removeprefix('.lock-')}")
        time.sleep(_POLL)
    if got is None:
        return Turn(note=f"{path.parent} is on a file system without locks"), False
    if _stands_at(fd, path):
        _write(fd, {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
        return Turn(BuildLock(path, fd)), True
    left = _read(fd)
    if not left.get("ended"):
        return None, False
    if left.get("failure"):
        return Turn(note=f"another process could not store it ({left['failure']}); building side by side"), False
    return Turn(ended=True), False


class _News:
    """Says from time to time that this process waits."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._start = time.monotonic()
        self._next = _FIRST_NEWS

    def too_late(self) -> bool:
        return time.monotonic() - self._start >= self.timeout

    def tell(self, what: str) -> None:
        waited = time.monotonic() - self._start
        if waited >= self._next:
            self._next = waited + _NEWS
            logger.warning("compile cache: waiting for %s (%.0f s of at most %g s)", what, waited, self.timeout)


class Use:
    """A shared lock on an entry's manifest: while it lasts, `prune` leaves the entry alone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._finalizer = weakref.finalize(self, os.close, fd)

    @classmethod
    def take(cls, fd: int) -> Use | None:
        """Lock the open file; None when it is being pruned. ``fd`` is the object's from then on, or still yours."""
        return None if _try_lock(fd, fcntl.LOCK_SH) is False else cls(fd)

    def close(self) -> None:
        """End of use."""
        self._finalizer()

    def until_gone(self, user: object) -> None:
        """In use until ``user`` is collected or the process ends."""
        if self._finalizer.detach() is not None:
            weakref.finalize(user, os.close, self.fd)


@contextlib.contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process uses the manifest at ``path``; inside the block none can begin to. True without a file."""
    fd = -1
    for how in (os.O_RDWR, os.O_RDONLY):  # NFS wants a file that is open for writing
        with contextlib.suppress(OSError):
            fd = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC)
            break
    if fd < 0:  # no reader can open it for use either
        yield True
        return
    try:
        yield _try_lock(fd, fcntl.LOCK_EX) is not False
    finally:
        os.close(fd)


@contextlib.contextmanager
def mutex(root: Path) -> Iterator[None]:
    """One process at a time decides about entries and renames them."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        start = time.monotonic()
        while _try_lock(fd, fcntl.LOCK_EX) is False and time.monotonic() - start < _MUTEX_PATIENCE:
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def _stands_at(fd: int, path: Path) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _write(fd: int, state: dict[str, Any]) -> None:
    """The state of a lock file. Losing it loses a message, never a build."""
    data = json.dumps(state).encode()
    with contextlib.suppress(OSError):
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))


def _read(fd: int) -> dict[str, Any]:
    try:
        state = json.loads(os.pread(fd, 4096, 0))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _who(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host', 'an unknown host')}"
