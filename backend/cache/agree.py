"""What the ranks of torch.distributed tell each other about a compilation.

The words go through the store of the default process group, not through a collective: no tensor and no device is
needed, and who has not spoken can be named. Each compilation has two stages: all ranks say whether the cache had the
entry, and, unless all had it, all say that they are ready. A rank that fails says so, and the others end as well.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

logger = logging.getLogger("cannopy.backend")

LOOKED, ENDED, JOINED = "looked", "ended", "joined"
"""The two stages of a compilation, and the one of `process_groups.ensure`."""
FAILED = "cannopy/failed"
"""Prefix of the keys under which a rank says why it has ended (`backend.ranks.failed`)."""
_VERBS = {LOOKED: "look up", ENDED: "finish", JOINED: "create"}
_LONGEST_POLL = 0.5
_FIRST_NEWS, _NEWS = 5.0, 30.0
_LAST_WORD = 10.0
"""Seconds that the first rank gives the others to read what it has read."""
_LAST_NEWS = 3.0
"""The same for the reason why it stops; they look twice a second at least."""

_counts: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""Compilations so far, by process group and ranks: all ranks must count alike."""


class RankError(RuntimeError):
    """Some ranks did not come, failed, or compile something else; the message names them."""


@dataclass(frozen=True)
class Word:
    """What one rank says at one stage."""

    rank: int
    status: str
    what: str = ""
    key: str = ""
    reason: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    versions: Mapping[str, str] = field(default_factory=dict)
    own_graph: bool = False
    """Whether the graph is this rank's own and may hold collectives."""
    alike: Mapping[str, str] = field(default_factory=dict)
    """Digests of what has to be the same on every rank of a layout."""


class Peers:
    """The ranks that compile the same thing at the same time. `RankError` after ``timeout`` seconds of silence."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], number: int, what: str, timeout: float) -> None:
        self.rank, self.ranks, self.what, self.timeout = rank, tuple(ranks), what, timeout
        self._store = store
        self._prefix = f"cannopy/{'-'.join(map(str, _runs(self.ranks)))}/{number}"

    def exchange(self, stage: str, status: str, **more: Any) -> dict[int, Word]:
        """Say ``status`` and hear what every rank says."""
        word = Word(self.rank, status, self.what, **more)
        keys = {r: f"{self._prefix}/{stage}/{r}" for r in self.ranks}
        try:
            self._store.set(keys[self.rank], json.dumps(asdict(word)))
            self._wait(stage, keys)
            words = {r: Word(**json.loads(self._store.get(k))) for r, k in keys.items()}
            self._take_leave(keys)
        except RankError as e:
            self.fail(str(e))
            self._stay(keys)
            raise
        except RuntimeError as e:  # torch.distributed's errors are RuntimeErrors
            raise RankError(
                f"rank {self.rank} lost the store of the process group while it compiled {self.what}: the process that"
                f" holds it (rank 0 or torchrun) has ended ({str(e).splitlines()[0]})"
            ) from e
        other = {r: w.what for r, w in words.items() if w.what != self.what}
        if other:
            raise RankError(
                f"ranks compile different things at the same time: rank {self.rank} {self.what}, "
                + ", ".join(f"rank {r} {what}" for r, what in other.items())
                + "; compile in the same order on all ranks, or name in Options.ranks those that do"
            )
        return words

    def fail(self, reason: str) -> None:
        """Tell the others that this rank does not go on; the first failure is the one that counts."""
        word = json.dumps(asdict(Word(self.rank, "failed", self.what, reason=reason)))
        try:
            if not self._store.check([f"{self._prefix}/failed"]):
                self._store.set(f"{self._prefix}/failed", word)
        except RuntimeError as e:
            logger.debug("could not tell the other ranks: %s", e)

    def _wait(self, stage: str, keys: Mapping[int, str]) -> None:
        start = time.monotonic()
        pause, news = 0.005, _FIRST_NEWS
        while not self._store.check(list(keys.values())):
            if self._store.check([f"{self._prefix}/failed"]):
                w = Word(**json.loads(self._store.get(f"{self._prefix}/failed")))
                raise RankError(f"rank {w.rank} (process {w.pid} on {w.host}) did not compile {w.what}: {w.reason}")
            for rank, key in keys.items():
                if self._store.check([f"{FAILED}/{rank}"]) and not self._store.check([key]):
                    why = self._store.get(f"{FAILED}/{rank}").decode()
                    raise RankError(f"rank {rank} has ended before {self.what} was there: {why}")
            waited = time.monotonic() - start
            if waited >= self.timeout:
                raise RankError(
                    f"rank {self.rank} waited {waited:.0f} s for {self._missing(keys)} to "
                    f"{_VERBS.get(stage, stage)} {self.what}: their processes have ended, hang, or "
                    "do not compile it; name in Options.ranks the ranks that do, or raise Options.cache_timeout"
                )
            if waited >= news:
                news = waited + _NEWS
                logger.warning("compile cache: rank %d waits for %s to %s %s (%.0f s of at most %g s)", self.rank,
                               self._missing(keys), _VERBS.get(stage, stage), self.what, waited,
                               self.timeout)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)

    def _take_leave(self, keys: Mapping[int, str]) -> None:
        """The first rank, whose process often holds the store, stays until the others have heard."""
        self._store.set(f"{keys[self.rank]}/heard", "")
        end = time.monotonic() + _LAST_WORD
        while self.rank == self.ranks[0] and time.monotonic() < end:
            if self._store.check([f"{k}/heard" for k in keys.values()]):
                return
            time.sleep(0.005)

    def _stay(self, keys: Mapping[int, str]) -> None:
        """After a failure as well: those that wait with the first rank are to hear what has failed, not that the store
        is gone."""
        try:
            self._store.set(f"{keys[self.rank]}/told", "")
            present = [f"{k}/told" for k in keys.values() if self._store.check([k])]
            end = time.monotonic() + _LAST_NEWS
            while self.rank == self.ranks[0] and time.monotonic() < end and not self._store.check(present):
                time.sleep(0.005)
        except RuntimeError as e:
            logger.debug("could not wait for the other ranks: %s", e)

    def _missing(self, keys: Mapping[int, str]) -> str:
        return ranks_text([r for r, k in keys.items() if not self._store.check([k])])


def peers(what: str, ranks: Sequence[int] | None, timeout: float) -> Peers | None:
    """The ranks that compile ``what`` together, this one among them; None when it is alone. ValueError."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    together = tuple(range(world)) if ranks is None else tuple(sorted(set(ranks)))
    if rank not in together or together[-1] >= world or together[0] < 0:
        raise ValueError(f"ranks {list(together)}: expected ranks of a world of {world}, this one ({rank}) among them")
    if len(together) == 1:
        return None
    group = dist.group.WORLD
    count = _counts.setdefault(group, Counter())
    count[together] += 1
    return Peers(dist.distributed_c10d._get_default_store(), rank, together, count[together], what, timeout)


def different_versions(words: Mapping[int, Word]) -> list[str]:
    """``torch 2.13.0 on ranks 0-6, 2.14.0 on rank 7`` for every version that is not the same everywhere."""
    lines = []
    for name in sorted({n for w in words.values() for n in w.versions}):
        found: dict[str, list[int]] = {}
        for rank, word in words.items():
            found.setdefault(word.versions.get(name, "absent"), []).append(rank)
        if len(found) > 1:
            lines.append(f"{name} " + ", ".join(f"{v} on {ranks_text(r)}" for v, r in found.items()))
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(_runs(ranks))}"


def _runs(ranks: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
