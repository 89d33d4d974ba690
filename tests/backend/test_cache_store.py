"""The cache on disk: hits, corruption, races, paths, failures."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from pathlib import Path

import pytest
import torch
from torch import fx

from cannopy.backend.build import CacheWarning, build
from cannopy.backend.cache import list_entries, prune, store, verify
from cannopy.backend.cache.folder import CacheFolderError, default_cache_dir
from cannopy.backend.cache.publish import publish
from cannopy.backend.emit import EmitError
from cannopy.backend.options import BuildOptions
from cannopy.fx_passes.program import OutputSpec
from tests.backend.processes import fork, wait
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


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def only_entry(root: Path) -> Path:
    (entry,) = list_entries(root)
    return entry.path


def test_miss_then_hit(tmp_path) -> None:
    first, x, cache = compile_tiny(tiny(), eager(tmp_path), report={"fusions": {"a": 1}})
    assert first.report["cache"]["status"] == "miss"
    model = tiny(3)
    second, x, cache = compile_tiny(model, eager(tmp_path))
    assert second.report["cache"] == {"status": "hit", "key": first.report["cache"]["key"], "reason": ""}
    assert second.report["fusions"] == {"a": 1}
    assert second.artifact == first.artifact
    check_same_as_eager(second, model, x, cache)


def test_layout_and_modes(tmp_path) -> None:
    compile_tiny(tiny(), eager(tmp_path / "made"))
    entry = only_entry(tmp_path / "made")
    assert entry.name == f"Tiny-{list_entries(tmp_path / 'made')[0].key[:16]}"
    assert {p.name for p in entry.iterdir()} == {"module.py", "manifest.json", "build.log"}
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in entry.iterdir())
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    assert set(os.listdir(tmp_path / "made")) == {entry.name}


def test_a_miss_compares_with_the_nearest_entry(tmp_path) -> None:
    model = tiny()
    compile_tiny(model, eager(tmp_path))
    model.factor = 5.0
    compile_tiny(model, eager(tmp_path, text="phase=decode"))
    model.factor = 2.0
    found = look(model, example(), eager(tmp_path, text="phase=decode"))
    assert found.status == "miss"
    assert found.reason == "changed: attributes (self.factor: 5.0 -> 2.0)"
    assert "options" not in found.reason


def test_constants_of_the_graph_are_stored(tmp_path) -> None:
    model = tiny()
    x, cache = example()
    for expected in ("miss", "hit"):
        program = tiny_program(model, x, cache)
        program.gm.register_buffer("offset", torch.arange(8.0))
        graph = program.gm.graph
        mul = next(iter(graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)))
        with graph.inserting_after(mul):
            offset = graph.get_attr("offset")
        with graph.inserting_after(offset):
            total = graph.call_function(torch.ops.aten.add.Tensor, (mul, offset))
        next(iter(graph.find_nodes(op="output"))).args = ((total,),)
        compiled, x, cache = compile_tiny(model, eager(tmp_path), program)
        assert compiled.report["cache"]["status"] == expected
        want = torch.nn.functional.linear(x, model.proj.weight * 2) * model.scale + torch.arange(8.0)
        torch.testing.assert_close(compiled(x, cache)["y"], want, rtol=1e-6, atol=1e-6)


def truncate(entry: Path, name: str) -> None:
    (entry / name).write_bytes((entry / name).read_bytes()[:-3])


def edit(entry: Path, name: str) -> None:
    data = bytearray((entry / name).read_bytes())
    data[len(data) // 2] ^= 1
    (entry / name).write_bytes(bytes(data))


def edit_manifest_value(entry: Path, name: str) -> None:
    body = json.loads((entry / "manifest.json").read_text())
    body["weights"][0]["recipe"] = "w[0]"
    (entry / "manifest.json").write_text(json.dumps(body))


def make_directory(entry: Path, name: str) -> None:
    (entry / name).unlink()
    (entry / name).mkdir()


DAMAGE = [
    (truncate, "module.py"),
    (truncate, "manifest.json"),
    (edit, "module.py"),
    (edit, "manifest.json"),
    (edit_manifest_value, "manifest.json"),
    (lambda e, n: (e / n).write_bytes(b""), "manifest.json"),
    (lambda e, n: (e / n).unlink(), "module.py"),
    (lambda e, n: (e / n).unlink(), "manifest.json"),
    (make_directory, "manifest.json"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGE)
def test_a_corrupt_entry_is_rebuilt_and_kept_aside(tmp_path, damage, name: str) -> None:
    compile_tiny(tiny(), eager(tmp_path))
    entry = only_entry(tmp_path)
    damage(entry, name)
    damaged = snapshot(entry)
    assert verify(tmp_path)[0].problem is not None
    model = tiny()
    compiled, x, cache = compile_tiny(model, eager(tmp_path))
    assert compiled.report["cache"]["status"] == "rebuilt"
    assert name in compiled.report["cache"]["reason"]
    check_same_as_eager(compiled, model, x, cache)
    assert [e.problem for e in verify(tmp_path)] == [None]
    aside = [p for p in tmp_path.iterdir() if p.name.startswith(".aside-")]
    assert [snapshot(p) for p in aside] == [damaged]
    assert look(model, example(), eager(tmp_path)).status == "hit"


def test_a_stored_entry_of_another_key_is_not_used(tmp_path) -> None:
    compile_tiny(tiny(), eager(tmp_path))
    entry = only_entry(tmp_path)
    model = tiny()
    model.factor = 9.0
    other = look(model, example(), eager(tmp_path))
    entry.rename(other.path)
    again = look(model, example(), eager(tmp_path))
    assert (again.status, again.reason) == ("rebuilt", "the manifest is of another key")


def bad_program(model, x, cache):
    program = tiny_program(model, x, cache)
    node = next(iter(program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)))
    node.target = torch.mm
    return program


def test_a_failed_build_leaves_the_cache_as_it_was(tmp_path) -> None:
    model = tiny()
    compile_tiny(model, eager(tmp_path))
    before = snapshot(tmp_path)
    model.factor = 7.0
    with pytest.raises(EmitError):
        compile_tiny(model, eager(tmp_path), bad_program(model, *example()))
    assert snapshot(tmp_path) == before
    assert len(os.listdir(tmp_path)) == 1


def test_a_full_disk_means_uncached(tmp_path, monkeypatch) -> None:
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    model = tiny()
    with pytest.warns(CacheWarning, match="No space left.*running uncached"):
        compiled, x, cache = compile_tiny(model, eager(tmp_path))
    check_same_as_eager(compiled, model, x, cache)
    assert "No space left" in compiled.report["cache"]["reason"]
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    compile_tiny(model, eager(tmp_path))
    assert list_entries(tmp_path)[0].problem is None


def test_a_folder_that_cannot_be_made_means_uncached(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    model = tiny()
    with pytest.warns(CacheWarning, match="running uncached"):
        compiled, x, cache = compile_tiny(model, eager(tmp_path / "file" / "cache"))
    check_same_as_eager(compiled, model, x, cache)


def test_an_object_that_cannot_be_stored_means_uncached(tmp_path) -> None:
    model = tiny()
    x, cache = example()
    program = tiny_program(model, x, cache)
    leaves = (program.output.leaves[0], ("const", object()))
    program.output = OutputSpec(program.output.treespec, leaves)
    with pytest.warns(CacheWarning, match="output leaf 1: a object cannot be stored"):
        compiled, x, cache = compile_tiny(model, eager(tmp_path), program)
    assert compiled(x, cache)["cache"] is cache
    assert os.listdir(tmp_path) == []


def test_folders_that_others_can_write_are_refused(tmp_path, monkeypatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(CacheFolderError, match=r"open can be written by everybody \(mode 777\)"):
        look(tiny(), example(), eager(open_to_all))
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: closed.stat().st_uid + 1)
    with pytest.raises(CacheFolderError, match=r"closed belongs to uid \d+"):
        look(tiny(), example(), eager(closed))


ODD = ["a b", "it's", 'quo"te', "{braces}", "中文", "back\\slash", "x" * 200, "%s $HOME", "new\nline"]


@pytest.mark.parametrize("name", ODD)
def test_odd_paths(tmp_path, name: str) -> None:
    model = tiny()
    for status in ("miss", "hit"):
        compiled, x, cache = compile_tiny(model, eager(tmp_path / name))
        assert compiled.report["cache"]["status"] == status
        check_same_as_eager(compiled, model, x, cache)


def test_relative_and_home_paths(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    compile_tiny(tiny(), eager(Path("here/")))
    assert look(tiny(), example(), eager(tmp_path / "here")).status == "hit"
    assert look(tiny(), example(), eager(Path("~/here"))).status == "hit"


def test_default_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == tmp_path / ".cache" / "cannopy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    compile_tiny(tiny(), BuildOptions(engine="eager"))
    assert list_entries()[0].path.parent == tmp_path / "xdg" / "cannopy"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_cache_dir() == tmp_path / ".cache" / "cannopy"


def test_publishing_over_a_valid_entry_keeps_it(tmp_path) -> None:
    model = tiny()
    x, cache = example()
    found = [look(model, (x, cache), eager(tmp_path)) for _ in range(2)]
    built = []
    for f in found:
        program = tiny_program(model, x, cache)
        built.append(build(program, model, "forward", (x, cache), {}, eager(tmp_path), f, {}, make_output))
        inode = only_entry(tmp_path).stat().st_ino
    assert only_entry(tmp_path).stat().st_ino == inode
    assert len(os.listdir(tmp_path)) == 1
    for compiled in built:
        check_same_as_eager(compiled, model, x, cache)


def test_publishing_over_rubbish_replaces_it(tmp_path) -> None:
    model = tiny()
    found = look(model, example(), eager(tmp_path))
    found.path.mkdir()
    (found.path / "manifest.json").write_text("{}")
    x, cache = example()
    program = tiny_program(model, x, cache)
    build(program, model, "forward", (x, cache), {}, eager(tmp_path), found, {}, make_output)
    assert [e.problem for e in verify(tmp_path)] == [None]


def test_four_writers_and_four_readers(tmp_path) -> None:
    """From the moment that an entry can be seen, every reader finds it whole; writers never disturb one another."""
    compiled, _, _ = compile_tiny(tiny(), eager())
    artifact = compiled.artifact
    extra = tmp_path / "extra"
    extra.write_bytes(os.urandom(1 << 20))
    for repeat in range(10):
        root = tmp_path / str(repeat)
        root.mkdir()

        def write(root: Path = root) -> None:
            publish(artifact, {"om": extra}, [], root)

        def read(root: Path = root) -> None:
            end = time.monotonic() + 60
            while (found := store.find(root, "Tiny", artifact.fingerprint)).status == "miss":
                assert time.monotonic() < end
            assert found.status == "hit", found.reason

        wait([fork(work) for work in (read, write) * 4])
        assert len(os.listdir(root)) == 1
        assert [e.problem for e in verify(root)] == [None]


def test_many_repairs_at_once(tmp_path) -> None:
    compiled, _, _ = compile_tiny(tiny(), eager(tmp_path))
    artifact = compiled.artifact
    for _ in range(10):
        truncate(only_entry(tmp_path), "module.py")
        wait([fork(lambda: publish(artifact, {}, [], tmp_path) and None) for _ in range(4)])
        assert [e.problem for e in verify(tmp_path)] == [None]


def test_prune(tmp_path) -> None:
    model = tiny()
    for i in range(3):
        model.factor = float(i)
        compile_tiny(model, eager(tmp_path))
        os.utime(list_entries(tmp_path)[0].path, (1000 + i, 1000 + i))
    old, aside, new = (f"{kind}Tiny-{0:016x}-{n}-0f" for n, kind in enumerate((".tmp-", ".aside-", ".tmp-")))
    for name in (old, aside, new):
        (tmp_path / name).mkdir()
        if name != new:
            os.utime(tmp_path / name, (1, 1))
    newest = list_entries(tmp_path)[0].path
    removed = prune(tmp_path, keep=1)
    assert {p.name for p in removed} >= {old, aside}
    assert set(os.listdir(tmp_path)) == {newest.name, new}
    assert prune(tmp_path, older_than=10**12) == []
    assert prune(tmp_path) == [newest]
    assert os.listdir(tmp_path) == [new]


def test_listing_an_absent_folder(tmp_path) -> None:
    assert list_entries(tmp_path / "none") == verify(tmp_path / "none") == prune(tmp_path / "none") == []


def test_graph_module_is_not_needed_to_load(tmp_path, monkeypatch) -> None:
    compile_tiny(tiny(), eager(tmp_path))
    monkeypatch.setattr(fx.GraphModule, "__init__", None)
    assert look(tiny(), example(), eager(tmp_path)).status == "hit"
