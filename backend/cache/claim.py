"""Looking an entry up, or getting the right to build it: of several processes one builds and the others wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cannopy.backend.artifact import Fingerprint
from cannopy.backend.cache import store
from cannopy.backend.cache.folder import entry_path, lock_path
from cannopy.backend.cache.lock import BuildLock, build_turn
from cannopy.backend.cache.prune import sweep
from cannopy.backend.cache.store import Found

_ROUNDS = 4


@dataclass(frozen=True)
class Claim:
    """What stands at the entry's place, and on a miss the lock under which to build.

    Without a lock the caller builds side by side with others; ``note`` says why.
    """

    found: Found
    lock: BuildLock | None = None
    note: str = ""


def find_or_claim(cache_dir: Path, model_class: str, fingerprint: Fingerprint, timeout: float) -> Claim:
    """The entry; if there is none, after waiting up to ``timeout`` seconds for who builds it, or a claim to build it.

    OSError when the folder cannot be read.
    """
    found = store.find(cache_dir, model_class, fingerprint)
    if found.status == "hit":
        return Claim(found)
    path = entry_path(cache_dir, model_class, fingerprint.key)
    end = time.monotonic() + timeout
    note = ""
    for _ in range(_ROUNDS):
        turn = build_turn(lock_path(path), max(end - time.monotonic(), 0.0))
        again = store.find(cache_dir, model_class, fingerprint)  # it may have come between looking and locking
        if again.status == "hit":
            if turn.lock is not None:
                turn.lock.release()
            return Claim(again)
        if turn.lock is not None:
            sweep(path)
        if not turn.ended:
            return Claim(again, turn.lock, turn.note)
        note = "another process built it and it is gone again"
    return Claim(again, None, note)
