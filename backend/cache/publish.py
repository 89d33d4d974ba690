"""The compile cache on disk: writing. An entry is written beside its place and gets there by one rename."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from cannopy.backend.artifact import Artifact
from cannopy.backend.cache import lock, manifest, store
from cannopy.backend.cache.folder import TMP, entry_path, sync_folder, write_private
from cannopy.backend.cache.manifest import MANIFEST, TORCHAIR, CorruptError

logger = logging.getLogger("cannopy.backend")


def publish(artifact: Artifact, torchair_files: Mapping[str, Path], log: list[str], cache_dir: Path) -> lock.Use | None:
    """Store the entry of `artifact`. Another process's valid entry of the same key is left as it is.

    Returns the use of the entry that stands there now, if it can be had.

    Raises OSError when the folder cannot be written and `NotCacheableError`; nothing is left behind then. A process
    that is killed leaves a private folder that `prune` and the next builder of the entry take away.
    """
    final = entry_path(cache_dir, artifact.model_class, artifact.fingerprint.key)
    files = manifest.own_files(artifact, log)
    files |= {f"{TORCHAIR}/{name}": path.read_bytes() for name, path in torchair_files.items()}
    text = manifest.dump(artifact, files)
    staging = cache_dir / f"{TMP}{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
    use: lock.Use | None = None
    mine = False
    try:
        staging.mkdir(mode=0o700)
        use = _mark_used(staging / MANIFEST)
        for name, data in files.items():
            write_private(staging / name, data)
        _fill(use.fd, text)
        for folder, _, _ in os.walk(staging):
            sync_folder(Path(folder))
        with lock.mutex(cache_dir):
            mine = _rename_into_place(staging, final)
        sync_folder(cache_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if use is not None and not mine:
            use.close()
    return use if mine else store.use_of(final)


def _mark_used(path: Path) -> lock.Use:
    """The manifest, still empty and in use from its first moment: `prune` sees that its writer is alive."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    use = lock.Use.take(fd)
    if use is None:  # pruned between two lines
        os.close(fd)
        raise OSError(f"{path.parent} was removed by another process")
    return use


def _fill(fd: int, data: bytes) -> None:
    with os.fdopen(os.dup(fd), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _rename_into_place(staging: Path, final: Path) -> bool:
    """Whether it is ours that stands there now; if not, it is another valid one."""
    for _ in range(8):
        try:
            staging.rename(final)
            return True
        except (FileExistsError, NotADirectoryError):
            pass
        except OSError as e:
            if not os.path.lexists(final):
                raise
            logger.debug("compile cache: %s is taken (%s)", final, e)
        try:
            inode = os.lstat(final).st_ino
            store.read_entry(final)
            return False  # somebody published the same compilation first
        except (FileNotFoundError, store.MovedError):
            continue
        except CorruptError as e:
            store.move_aside(final, str(e), inode)
    raise OSError(f"could not publish {final}: its place was taken eight times by entries that are not valid")
