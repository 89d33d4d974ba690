"""Several processes on one cache: who builds, who waits, what a kill leaves, what may be pruned."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cannopy.backend.build import build
from cannopy.backend.cache import list_entries, lock, prune, verify
from cannopy.backend.cache.folder import lock_path
from cannopy.backend.cache.lock import build_turn
from tests.backend.programs import (
    check_same_as_eager,
    compile_tiny,
    eager,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)
from tests.backend.test_cache_store import only_entry
from tests.cache_faults.kills import Fuzz, start, start_together, wait
from tests.cache_faults.test_machine import right


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """A small share of what ``tools/cache_fuzz.py`` does."""
    fuzz = Fuzz(tmp_path, "eager", seed=3)
    while fuzz.tally.killed < 6:
        fuzz.round()
        assert fuzz.tally.problems == []
        assert fuzz.tally.rounds < 60


def built(cache: Path, log: Path, seconds: float = 0.3, fail: bool = False) -> None:
    """Look up, and build slowly on a miss; ``log`` gets a line per build and per hit."""
    model = tiny()
    found = look(model, example(), eager(cache, cache_timeout=20.0))
    if found.compiled is None:
        with found:
            _note(log, "building")
            time.sleep(seconds)
            if fail:
                _note(log, "failed")
                raise RuntimeError("no converter")
            x, state = example()
            program = tiny_program(model, x, state)
            compiled = build(program, model, "forward", (x, state), {}, eager(cache), found, {}, make_output)
    else:
        compiled = found.compiled
        _note(log, "hit")
    check_same_as_eager(compiled, model, *example())


def _note(log: Path, line: str) -> None:
    with log.open("a") as f:
        f.write(f"{line}\n")


def test_several_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pids = start_together([lambda: built(tmp_path / "cache", log)] * 4)
    assert [wait(pid) for pid in pids] == [0] * 4
    assert sorted(log.read_text().split()) == ["building", "hit", "hit", "hit"]
    assert len(os.listdir(tmp_path / "cache")) == 1


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """Also when the holder has children of its own, which stay."""
    log = tmp_path / "log"

    def holder() -> None:
        found = look(tiny(), example(), eager(tmp_path / "cache"))
        assert found.lock is not None
        start(lambda: time.sleep(12))
        _note(log, "building")
        time.sleep(60)

    pid = start(holder)
    while not log.exists():
        time.sleep(0.01)
    waiter = start(lambda: built(tmp_path / "cache", log, 0.0))
    time.sleep(0.2)
    assert log.read_text().split() == ["building"]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert wait(pid) == -signal.SIGKILL
    assert wait(waiter) == 0
    assert time.monotonic() - began < 9
    assert log.read_text().split() == ["building", "building"]


def test_who_fails_does_not_make_the_others_queue(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Four builds that all fail: the last three run at once, not one after the other."""
    log = tmp_path / "log"
    pids = start_together([lambda: built(tmp_path / "cache", log, 1.5, fail=True)] * 4)
    assert [wait(pid) for pid in pids] == [1] * 4
    assert log.read_text().split() == ["building", "failed", *["building"] * 3, *["failed"] * 3]
    assert "no converter" in capfd.readouterr().err
    assert os.listdir(tmp_path / "cache") == []


def test_a_holder_that_hangs_is_waited_for_with_news_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_FIRST_NEWS", 0.1)
    monkeypatch.setattr(lock, "_NEWS", 0.4)
    found = look(tiny(), example(), eager(tmp_path))
    assert found.lock is not None
    pid = os.getpid()
    turns = []
    waiter = threading.Thread(target=lambda: turns.append(build_turn(lock_path(found.path), 1.5)))
    with caplog.at_level(logging.WARNING, "cannopy.backend"):
        waiter.start()
        waiter.join()
    assert turns[0].lock is None
    assert f"process {pid} on " in turns[0].note
    assert "not finished within 1.5 s; building side by side" in turns[0].note
    news = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert 2 <= len(news) <= 5
    assert f"process {pid} on " in news[0]
    assert f"to build {found.path.name} (0 s of at most 1.5 s)" in news[0]
    with found:
        pass
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    report = right(tmp_path)
    assert report["status"] == "miss"
    assert "file system without locks" in report["reason"]
    assert right(tmp_path)["status"] == "hit"
    assert [e.problem for e in verify(tmp_path)] == [None]
    log = tmp_path / "log"
    pids = start_together([lambda: built(tmp_path / "cache", log)] * 3)
    assert [wait(pid) for pid in pids] == [0] * 3
    assert [e.problem for e in verify(tmp_path / "cache")] == [None]


def test_what_a_process_runs_is_not_pruned(tmp_path: Path) -> None:
    compiled, _, _ = compile_tiny(tiny(), eager(tmp_path))
    (entry,) = list_entries(tmp_path)
    assert entry.in_use
    assert wait(start(lambda: _expect_nothing_pruned(tmp_path))) == 0
    again, _, _ = compile_tiny(tiny(), eager(tmp_path))
    del compiled
    gc.collect()
    assert prune(tmp_path) == []
    assert list_entries(tmp_path)[0].hits == 1
    del again
    gc.collect()
    assert not list_entries(tmp_path)[0].in_use
    assert prune(tmp_path) == [entry.path]


def _expect_nothing_pruned(cache: Path) -> None:
    assert prune(cache) == []


def test_readers_while_another_process_prunes(tmp_path: Path) -> None:
    """A look-up sees all of an entry or none of it."""
    cache = tmp_path / "cache"

    def use() -> None:
        for _ in range(3):
            assert right(cache)["status"] in ("hit", "miss")
            gc.collect()

    def empty() -> None:
        for _ in range(20):
            prune(cache)
            time.sleep(0.005)

    pids = start_together([use, use, empty])
    assert [wait(pid) for pid in pids] == [0] * 3
    assert not [p for p in os.listdir(cache) if p.startswith((".aside-", ".trash-"))]


def test_half_an_entry_of_a_killed_writer_goes_with_the_next_build(tmp_path: Path) -> None:
    found = look(tiny(), example(), eager(tmp_path))
    with found:
        half = tmp_path / f".tmp-{found.path.name}-1-00"
        half.mkdir()
        (half / "manifest.json").write_text("")
    del found
    right(tmp_path)
    assert os.listdir(tmp_path) == [only_entry(tmp_path).name]
