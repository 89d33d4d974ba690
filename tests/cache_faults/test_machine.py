"""What a machine does to a cache folder: no room, no rights, odd owners and modes, no home, a clock that jumps.

After every fault: the result is right, entries that were good still are, the message says what was wrong, and the next
run works.
"""

from __future__ import annotations

import errno
import os
import pwd
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cannopy.backend.build import CacheWarning
from cannopy.backend.cache import list_entries, prune, verify
from cannopy.backend.cache.folder import CacheFolderError, is_leftover, resolve_dir, without_prefix
from cannopy.backend.cache.prune import Wanted, remove
from cannopy.backend.cache.publish import publish
from cannopy.backend.options import BuildOptions
from cannopy.backend.torchair import WorkFolderError
from tests.backend.programs import check_same_as_eager, compile_tiny, eager, example, look, tiny
from tests.backend.test_cache_store import only_entry, snapshot
from tests.cache_faults.kills import start, wait

NOBODY = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def right(cache: Path | None, factor: float = 2.0) -> dict[str, str]:
    """Compile, compare with eager; the report's ``cache`` part."""
    model = tiny()
    model.factor = factor
    compiled, x, state = compile_tiny(model, eager(cache))
    check_same_as_eager(compiled, model, x, state)
    return compiled.report["cache"]


@pytest.fixture
def full_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[int]]]:
    """``full_at(n)``: the n-th step that needs room on the cache's disk fails; the list counts the steps."""

    def here(path: object) -> bool:
        return str(path).startswith(str(tmp_path))

    def set_up(n: int) -> list[int]:
        steps: list[int] = []

        def failing(original: Callable[..., object], needs_room: Callable[..., bool]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                if needs_room(*args):
                    steps.append(len(steps))
                    if len(steps) == n:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
                return original(*args, **kwargs)

            return call

        new_file = failing(os.open, lambda path, flags=0, *_: bool(flags & os.O_CREAT) and here(path))
        monkeypatch.setattr(os, "open", new_file)
        monkeypatch.setattr(os, "mkdir", failing(os.mkdir, lambda path, *_: here(path)))
        monkeypatch.setattr(os, "fsync", failing(os.fsync, lambda *_: True))
        monkeypatch.setattr(os, "rename", failing(os.rename, lambda path, *_: here(path)))
        return steps

    yield set_up
    monkeypatch.undo()


def test_a_disk_that_is_full_at_any_step(tmp_path: Path, full_at: Callable[[int], list[int]],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    right(tmp_path, 3.0)
    before = snapshot(tmp_path)
    uncached = n = 0
    while True:
        n += 1
        steps = full_at(n)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            report = right(tmp_path)
        monkeypatch.undo()
        if len(steps) < n:
            break
        monkeypatch.setattr("cannopy.backend.cache.key.package_digest", lambda: "pinned")
        assert report["status"] == "miss"
        if "running uncached" in report["reason"]:
            uncached += 1
            assert any("No space left" in str(w.message) and str(tmp_path) in str(w.message) for w in said)
        assert {e.problem for e in verify(tmp_path)} == {None}
        assert not [p for p in os.listdir(tmp_path) if p.startswith((".tmp-", ".aside-", ".trash-"))]
        assert {k: v for k, v in snapshot(tmp_path).items() if k in before} == before
        right(tmp_path)
        assert right(tmp_path)["status"] == "hit"
        for entry in list_entries(tmp_path):  # of calls with patched functions, which count as code, and without
            if entry.path.name not in "".join(before):
                shutil.rmtree(entry.path)
    assert uncached >= 6


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The kernel refuses to write beyond a size, in the middle of a write."""
    for limit in (0, 1, 700, 5000):

        def work(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            report = right(tmp_path)
            assert "File too large" in report["reason"], report

        assert wait(start(work)) == 0, limit
        assert [p for p in os.listdir(tmp_path) if not p.startswith(".lock-")] == []
    assert right(tmp_path)["status"] == "miss"
    assert right(tmp_path)["status"] == "hit"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can reach, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="cannopy-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_nobody(work: Callable[[], None]) -> None:
    """Run `work` in a process that is not root."""

    def unprivileged() -> None:
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    assert wait(start(unprivileged)) == 0


def test_a_read_only_folder(shared: Path) -> None:
    cache = shared / "cache"
    cache.mkdir()
    if os.getuid() == 0:
        os.chown(cache, NOBODY, NOBODY)
    as_nobody(lambda: _expect(right(cache), "miss"))

    def read_only() -> None:
        (entry,) = (e.path for e in list_entries(cache))
        (entry / "uses").unlink(missing_ok=True)
        entry.chmod(0o500)
        cache.chmod(0o500)
        _expect(right(cache), "hit")
        with pytest.warns(CacheWarning, match=r"cache not usable \(.*Permission denied.*running uncached"):
            _expect(right(cache, 3.0), "miss")
        entry.chmod(0o700)
        (entry / "module.py").write_bytes(b"#")
        damaged = snapshot(cache)
        with pytest.warns(CacheWarning, match="running uncached"):
            _expect(right(cache), "rebuilt")
        assert snapshot(cache) == damaged
        cache.chmod(0o700)
        _expect(right(cache), "rebuilt")
        _expect(right(cache), "hit")

    as_nobody(read_only)


def _expect(report: dict[str, str], status: str) -> None:
    assert report["status"] == status, report


@root_only
@pytest.mark.parametrize("name", [".", "module.py", "manifest.json"])
def test_an_entry_of_somebody_else_is_not_read(tmp_path: Path, name: str) -> None:
    right(tmp_path)
    os.chown(only_entry(tmp_path) / name, NOBODY, NOBODY)
    report = right(tmp_path)
    assert report["status"] == "rebuilt"
    assert f"belongs to uid {NOBODY}" in report["reason"]
    assert right(tmp_path)["status"] == "hit"


@root_only
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    right(tmp_path / "a")
    before = snapshot(tmp_path)
    os.chown(tmp_path / "a", NOBODY, NOBODY)
    with pytest.raises(CacheFolderError, match=f"a belongs to uid {NOBODY}, this process has uid 0.*another cache_dir"):
        right(tmp_path / "a")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("name", "mode"), [(".", 0o777), ("module.py", 0o666), ("manifest.json", 0o620)])
def test_an_entry_that_others_could_have_written_is_not_read(tmp_path: Path, name: str, mode: int) -> None:
    right(tmp_path)
    (only_entry(tmp_path) / name).chmod(mode)
    report = right(tmp_path)
    assert report["status"] == "rebuilt"
    assert f"(mode {mode:o})" in report["reason"]
    assert right(tmp_path)["status"] == "hit"


def test_modes_that_only_let_others_read_are_taken(tmp_path: Path) -> None:
    right(tmp_path)
    entry = only_entry(tmp_path)
    for path in (tmp_path, entry, *entry.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert right(tmp_path)["status"] == "hit"
    tmp_path.chmod(0o770)
    with pytest.raises(CacheFolderError, match=r"can be written by its group \(mode 770\).*chmod go-w"):
        resolve_dir(tmp_path)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(CacheWarning, match="pass cache_dir or set XDG_CACHE_HOME.*running uncached"):
        found = look(tiny(), example(), BuildOptions(engine="eager"))
    assert (found.status, found.path) == ("miss", None)
    with pytest.warns(CacheWarning, match="~no_such_user/x"):
        look(tiny(), example(), eager(Path("~no_such_user/x")))


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right(tmp_path)
    entry = only_entry(tmp_path)
    for at in (1.0, time.time() + 10**9):
        for path in (entry, entry / "manifest.json", tmp_path):
            os.utime(path, (at, at))
        assert right(tmp_path)["status"] == "hit"
    assert prune(tmp_path, older_than=1.0) == []  # from the future: not old
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert right(tmp_path)["status"] == "hit"
    assert right(tmp_path, 3.0)["status"] == "miss"
    assert prune(tmp_path, older_than=1.0) == []


def test_what_is_being_written_is_not_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old it looks."""
    artifact = compile_tiny(tiny(), eager())[0].artifact
    seen = []
    original = os.fsync

    def meanwhile(fd: int) -> None:
        for path in tmp_path.glob(".tmp-*"):
            os.utime(path, (1, 1))
            seen.append(wait(start(lambda: _prunes_nothing(tmp_path))))
        original(fd)

    monkeypatch.setattr(os, "fsync", meanwhile)
    publish(artifact, {}, [], tmp_path)
    assert seen
    assert set(seen) == {0}
    assert verify(tmp_path)[0].problem is None


def _prunes_nothing(cache: Path) -> None:
    assert prune(cache) == []


def test_no_temporary_folder_costs_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right(tmp_path)
    before = snapshot(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(WorkFolderError, match=r"temporary files.*TMPDIR"):
        right(tmp_path)
    after = snapshot(tmp_path)
    assert {k: v for k, v in after.items() if not k.endswith("uses")} == before


def test_what_belongs_to_others_is_neither_listed_nor_pruned(tmp_path: Path) -> None:
    """A cache folder that is somebody's home."""
    compile_tiny(tiny(), eager(tmp_path))
    (entry,) = list_entries(tmp_path)
    others = ["projects", "Tiny", "Tiny-1", ".config", ".tmp-work", ".lock-screen", ".trash-1000", ".aside-x", "a-b c",
              ".weights-models", "run-20261130", f"{entry.path.name}x"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        os.utime(tmp_path / name, (0, 0))
    left = tmp_path / f".tmp-{entry.path.name}-77-abcd1234"
    left.mkdir()
    os.utime(left, (0, 0))
    assert [e.path for e in list_entries(tmp_path)] == [entry.path]
    done = remove(tmp_path, Wanted(older_than=0.0, unused_for=0.0, max_bytes=0, stale=True, bad=True, old_weights=True))
    assert sorted(r.path for r in done) == sorted([entry.path, left])
    assert all(is_leftover(n) for n in (f".trash-{without_prefix(left.name)}-0f", f".lock-{entry.path.name}"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == sorted(others)
