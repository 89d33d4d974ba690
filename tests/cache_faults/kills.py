"""Processes that share a compile cache while one of them is killed (SIGKILL) at a random moment.

A round starts several processes at once. Each looks up one of a few models and, on a miss, builds and publishes it;
each checks what it got. One is killed. Afterwards the cache must be whole: the others have succeeded, every entry that
was good still is, byte for byte, every entry is what its manifest says, and one more process succeeds.

Processes are forked from one that has imported torch, so that a round costs milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.cache import list_entries, prune, verify
from cannopy.backend.cache.claim import find_or_claim
from cannopy.backend.cache.folder import LOCK, TMP, TRASH
from cannopy.backend.cache.publish import publish
from cannopy.backend.options import BuildOptions
from tests.backend.programs import check_same_as_eager, compile_tiny, eager, tiny
from tests.backend.test_cache_store import snapshot

Mode = Literal["store", "eager", "torchair"]
FACTORS = (2.0, 3.0)
"""Values of the attribute that tells the models apart."""
_PATIENCE = 300.0
_EXTRA = 1 << 18


@dataclass
class Tally:
    """What happened in the rounds so far. ``problems`` are the failures; the rest says what the kills hit."""

    rounds: int = 0
    killed: int = 0
    landed: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Fuzz:
    """Rounds on one cache folder under ``root``; ``seconds`` is the longest time after which the kill comes."""

    def __init__(self, root: Path, mode: Mode, seed: int, processes: int = 4) -> None:
        self.cache = root / "cache"
        self.mode, self.processes = mode, processes
        self.random = random.Random(seed)
        self.tally = Tally()
        self._hurt = ""
        self._keep = False
        self._extra = root / "extra"
        self._extra.write_bytes(random.Random(0).randbytes(_EXTRA))
        self._artifacts = {f: _artifact(f) for f in FACTORS} if mode == "store" else {}
        if mode == "torchair":  # Dynamo and torchair are warm in every child then
            self._compile(FACTORS[0], root / "first")
        self.seconds = self._cost(root / "warm")

    def round(self) -> None:
        """One kill among concurrent processes, and all checks."""
        self._prepare()
        good = _good(self.cache)
        works = [self._work(self.random.choice(FACTORS), pruning=False) for _ in range(self.processes - 1)]
        pruning = self.random.random() < 0.2
        works.append(self._work(self.random.choice(FACTORS), pruning))
        pids = start_together(works)
        victim = self.random.choice(pids)
        time.sleep(self.seconds * self.random.random())
        os.kill(victim, signal.SIGKILL)
        if (status := wait(victim)) == -signal.SIGKILL:
            self.tally.killed += 1
            self._note_what_it_did(victim)
        elif status != 0:
            self.tally.problems.append(f"round {self.tally.rounds}: process {victim} ended with {status}")
        for pid in pids:
            if pid != victim and (status := wait(pid)) != 0:
                self.tally.problems.append(f"round {self.tally.rounds}: process {pid} ended with {status}")
        self._check(good, pruning)
        self.tally.rounds += 1

    def _prepare(self) -> None:
        """An empty cache, one with entries, or one with a damaged entry."""
        self._hurt = ""
        self._keep = self.random.random() < 0.5
        choice = self.random.random()
        if choice < 0.5:
            shutil.rmtree(self.cache, ignore_errors=True)
        elif choice < 0.7 and self.cache.is_dir():
            for entry in list_entries(self.cache)[:1]:
                self._hurt = entry.path.name  # stays as it is unless a process looks it up
                path = entry.path / self.random.choice(["module.py", "manifest.json"])
                path.write_bytes(path.read_bytes()[:-1])

    def _check(self, good: dict[str, dict[str, bytes]], pruning: bool) -> None:
        here = f"round {self.tally.rounds}"
        after = _good(self.cache)
        bad = [f"{e.path.name}: {e.problem}" for e in verify(self.cache) if e.problem and e.path.name != self._hurt]
        if bad:
            self.tally.problems.append(f"{here}: {'; '.join(bad)}")
        lost = [name for name in good if after.get(name) != good[name]]
        if lost and not pruning:
            self.tally.problems.append(f"{here}: lost or changed {', '.join(lost)}")
        for factor in FACTORS:
            if wait(start(self._work(factor, pruning=False))) != 0:
                self.tally.problems.append(f"{here}: the next run failed")
        if len(_good(self.cache)) != len(FACTORS):
            self.tally.problems.append(f"{here}: the next runs left no good entry")
        left = [p.name for p in self.cache.iterdir() if p.name.startswith(TMP)]
        self.tally.landed["rounds that leave half an entry"] += bool(left)

    def _note_what_it_did(self, victim: int) -> None:
        """Traces that only a writer leaves: half an entry, a lock file with its number."""
        with contextlib.suppress(OSError):
            for path in self.cache.iterdir():
                if path.name.startswith(TMP) and f"-{victim}-" in path.name:
                    self.tally.landed["killed while writing an entry"] += 1
                elif path.name.startswith(LOCK) and f'"pid": {victim},' in path.read_text():
                    self.tally.landed["killed while holding the lock"] += 1
                elif path.name.startswith(TRASH):
                    self.tally.landed["killed while pruning"] += 1

    def _work(self, factor: float, pruning: bool) -> Callable[[], None]:
        if pruning:
            return lambda: _empty(self.cache)
        if self.mode == "store":
            return lambda: self._store(factor)
        return lambda: self._compile(factor)

    def _store(self, factor: float) -> None:
        """The store alone: what is published is fixed beforehand."""
        artifact = self._artifacts[factor]
        self.cache.mkdir(mode=0o700, exist_ok=True)
        claim = find_or_claim(self.cache, "Tiny", artifact.fingerprint, _PATIENCE)
        if claim.found.content is None:
            publish(artifact, {"om": self._extra}, [], self.cache)
            if claim.lock is not None:
                claim.lock.release()
            claim = find_or_claim(self.cache, "Tiny", artifact.fingerprint, _PATIENCE)
        if claim.found.content is not None:  # it may be pruned again at once
            files = claim.found.content.files
            assert files["torchair/om"] == self._extra.read_bytes()
            assert files["module.py"] == artifact.module.source.encode()

    def _compile(self, factor: float, folder: Path | None = None) -> None:
        model = tiny()
        model.factor = factor
        options = BuildOptions("eager" if self.mode == "eager" else "torchair", cache_dir=folder or self.cache,
                               keep_weights=self._keep)
        compiled, x, cache = compile_tiny(model, options)
        check_same_as_eager(compiled, model, x, cache)

    def _cost(self, folder: Path) -> float:
        """Seconds of a round without a kill, so that the kills reach every part of one."""
        kept, self.cache = self.cache, folder
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            pids = start_together([self._work(f, pruning=False) for f in (*FACTORS, *FACTORS)])
            began = time.monotonic()
            for pid in pids:
                assert wait(pid) == 0
            seconds = time.monotonic() - began
        self.cache = kept
        return seconds


def _good(cache: Path) -> dict[str, dict[str, bytes]]:
    """The files of every entry that is what its manifest says; the count of its uses is not part of it."""
    found = {}
    for entry in verify(cache):
        if entry.problem is None:
            files = snapshot(entry.path)
            files.pop("uses", None)
            found[entry.path.name] = files
    return found


def _empty(cache: Path) -> None:
    prune(cache)


def _artifact(factor: float) -> Artifact:
    model = tiny()
    model.factor = factor
    return compile_tiny(model, eager())[0].artifact


def start_together(works: list[Callable[[], None]]) -> list[int]:
    """Forked processes that begin when all are there."""
    waiting, go = os.pipe()

    def held(work: Callable[[], None]) -> Callable[[], None]:
        def begin() -> None:
            os.close(go)
            os.read(waiting, 1)
            work()

        return begin

    pids = [start(held(work)) for work in works]
    os.close(go)
    os.close(waiting)
    return pids


def start(work: Callable[[], None]) -> int:
    """Run `work` in a forked process that says nothing unless it fails; the process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        status = 0
    except BaseException:  # noqa: BLE001 whatever it is, the parent must learn of it
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Exit code of a process (the negative signal that ended it); one that hangs is killed and gives 99."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99
