"""Entries whose files are not what was written, and things in a cache folder that are no entries."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.cache import list_entries, manifest, store, verify
from cannopy.backend.cache.folder import resolve_dir
from cannopy.backend.cache.publish import publish
from tests.backend.programs import compile_tiny, eager, tiny
from tests.backend.test_cache_store import only_entry, snapshot
from tests.cache_faults.test_machine import right


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    from dataclasses import replace

    found = compile_tiny(tiny(), eager())[0].artifact
    return replace(found, tensors={"offset": torch.arange(50.0)})


def publish_whole(artifact: Artifact, root: Path) -> Path:
    """An entry with every kind of file that one can have."""
    root.mkdir(exist_ok=True)
    stored = root / "stored"
    stored.write_bytes(random.Random(1).randbytes(3000))
    publish(artifact, {"Tiny_static_1f/forward/compiled_module": stored, "g.om": stored}, ["a line"], root)
    stored.unlink()
    return only_entry(root)


def test_every_file_cut_or_with_one_bit_changed_anywhere(artifact: Artifact, tmp_path: Path) -> None:
    entry = publish_whole(artifact, tmp_path)
    whole = store.read_entry(entry)
    draw = random.Random(5)
    names = [n for n in snapshot(entry) if n != "uses"]
    assert len(names) == 6
    for name in names:
        path = entry / name
        data = path.read_bytes()
        changed = [data[: draw.randrange(len(data))], data + b"\0", b""]
        for _ in range(12):
            at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
            changed.append(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        for bad in changed:
            path.write_bytes(bad)
            found = store.find(tmp_path, "Tiny", artifact.fingerprint)
            if found.status == "hit" and name == "manifest.json":  # 1e-05 and 1E-05 are one number
                assert found.content == whole
                continue
            assert found.status == "corrupt", (name, bad[:40])
            assert name in found.reason
        path.write_bytes(data)
    assert store.find(tmp_path, "Tiny", artifact.fingerprint).content == whole


def _link(path: Path) -> None:
    moved = path.rename(path.with_name(path.name + "-elsewhere"))
    path.symlink_to(moved)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _old_format(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()
    body = {"format": 1, "files": {"module.py": {}}}
    (entry / "manifest.json").write_text(json.dumps(body | {"sha256": manifest._self_digest(body)}))


def _escaping(entry: Path) -> None:
    body = json.loads((entry / "manifest.json").read_text())
    body.pop("sha256")
    (entry.parent / "outside").write_bytes(b"x")
    body["files"]["torchair/../../outside"] = {"sha256": manifest.sha256(b"x"), "bytes": 1}
    body["sha256"] = manifest._self_digest(body)
    (entry / "manifest.json").write_text(json.dumps(body))


def _of_a_stranger(entry: Path) -> None:
    """Valid by its own digest, made by something else."""
    body = {"format": manifest.FORMAT, "files": {}}
    (entry / "manifest.json").write_text(json.dumps(body | {"sha256": manifest._self_digest(body)}))


def _incomplete(entry: Path) -> None:
    body = json.loads((entry / "manifest.json").read_text())
    del body["inputs"], body["sha256"]
    body["sha256"] = manifest._self_digest(body)
    (entry / "manifest.json").write_text(json.dumps(body))


FOREIGN: list[tuple[str, Callable[[Path], object], str]] = [
    ("entry is a link", _link, "it is a file or a link, no folder"),
    ("file is a link", lambda e: _link(e / "module.py"), "module.py is a symbolic link"),
    ("manifest is a link", lambda e: _link(e / "manifest.json"), "manifest.json is a symbolic link"),
    ("manifest is a pipe", lambda e: _fifo(e / "manifest.json"), "manifest.json is no file"),
    ("file is a pipe", lambda e: _fifo(e / "module.py"), "module.py is no file"),
    ("entry is a file", lambda e: (shutil.rmtree(e), e.write_text("hello")), "it is a file or a link, no folder"),
    ("entry is empty", lambda e: (shutil.rmtree(e), e.mkdir()), "manifest.json is missing"),
    ("old format, half written", _old_format, "format 1, this version reads"),
    ("names lead out of the entry", _escaping, "lists files that no entry has"),
    ("manifest of a stranger", _of_a_stranger, "manifest.json has no key of this cache"),
    ("manifest without a part", _incomplete, "does not describe a compilation (KeyError('inputs'))"),
]


@pytest.mark.parametrize(("change", "reason"), [f[1:] for f in FOREIGN], ids=[f[0] for f in FOREIGN])
def test_what_is_no_entry_is_set_aside_and_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], object], reason: str
) -> None:
    right(tmp_path, 3.0)
    other = only_entry(tmp_path)
    right(tmp_path)
    (entry,) = (e.path for e in list_entries(tmp_path) if e.path != other)
    before = snapshot(other)
    change(entry)
    report = right(tmp_path)
    assert report["status"] == "rebuilt"
    assert reason in report["reason"]
    (line,) = (r.getMessage() for r in caplog.records if "set aside" in r.getMessage())
    assert str(entry) in line
    assert reason in line
    assert right(tmp_path)["status"] == "hit"
    assert snapshot(other) == before
    assert len([p for p in os.listdir(tmp_path) if p.startswith(".aside-")]) == 1


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_nobody_else_can_write_whatever_the_umask(artifact: Artifact, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        entry = publish_whole(artifact, resolve_dir(tmp_path / "new" / "cache"))
    finally:
        os.umask(before)
    inside = [p for p in entry.rglob("*") if p.is_dir()]
    assert len(inside) == 3
    for path in [entry.parent, entry, *inside]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700 & ~umask
    inside[-1].chmod(0o770)
    found = store.find(entry.parent, "Tiny", artifact.fingerprint)
    assert found.status == "corrupt"
    assert "can be written by its group (mode 770)" in found.reason


def test_files_that_the_manifest_does_not_name_are_never_read(artifact: Artifact, tmp_path: Path) -> None:
    entry = publish_whole(artifact, tmp_path)
    (entry / "torchair" / "evil.py").write_text("raise SystemExit")
    (entry / "notes").mkdir()
    content = store.find(tmp_path, "Tiny", artifact.fingerprint).content
    assert content is not None
    assert set(content.files) == set(content.body["files"])
    assert not any("evil" in name for name in content.files)


def test_other_things_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("mine")
    (tmp_path / "Tiny-notes").mkdir()
    (tmp_path / "Tiny-file").write_text("")
    (tmp_path / "Tiny-link").symlink_to("/nowhere")
    assert right(tmp_path)["status"] == "miss"
    assert right(tmp_path)["status"] == "hit"
    assert [e.problem is None for e in verify(tmp_path)].count(True) == 1
    assert (tmp_path / "README").read_text() == "mine"


def test_the_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    assert right(tmp_path / "cache")["status"] == "miss"
    assert right(tmp_path / "disk")["status"] == "hit"
