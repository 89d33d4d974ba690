"""The record of what was installed: torch_npu.libs/cannopy-standin.json."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST_NAME = "cannopy-standin.json"
LIBRARY_NAME = "libcannopy_standin.so"


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class CoreStamp:
    """Identity of libtorch_npu.so: its hash, with size and time so that a look usually suffices."""

    sha256: str
    size: int
    mtime: int
    """Whole seconds: image layers drop the fraction."""

    @classmethod
    def of(cls, path: Path) -> CoreStamp:
        """The stamp of the file as it is; reads all of it."""
        stat = path.stat()
        return cls(sha256(path), stat.st_size, int(stat.st_mtime))

    def matches(self, path: Path) -> bool:
        """Hashes the file (0.2 s for 100 MB) only when its time differs and its size does not."""
        stat = path.stat()
        if stat.st_size != self.size:
            return False
        return int(stat.st_mtime) == self.mtime or sha256(path) == self.sha256


@dataclass(frozen=True)
class Manifest:
    """What the stand-in in a folder was built from, and every file it consists of.

    `files` maps a name to the SHA-256 of its content, or to `-> target` for a symbolic link. The
    manifest itself is not among them.
    """

    torch_npu: str
    core: CoreStamp
    generator: str
    compiler: str
    symbols: int
    files: dict[str, str]

    def write(self, folder: Path) -> None:
        """Replace the manifest in `folder` in one step."""
        temporary = folder / f".{MANIFEST_NAME}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")
        temporary.replace(folder / MANIFEST_NAME)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None when there is none or it cannot be understood."""
        try:
            raw: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
            return cls(**{**raw, "core": CoreStamp(**raw["core"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def libraries(self) -> list[str]:
        """The CANN libraries stood in for, sorted."""
        return sorted(name for name in self.files if name != LIBRARY_NAME)

    def intact(self, folder: Path, name: str) -> bool:
        """Whether the file is there and is the one that was installed."""
        return fingerprint(folder / name) == self.files.get(name)


def fingerprint(path: Path) -> str | None:
    """`-> target` for a link, the hash for a file, None for neither."""
    try:
        if path.is_symlink():
            return f"-> {os.readlink(path)}"
        return sha256(path)
    except OSError:
        return None
