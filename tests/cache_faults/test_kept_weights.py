"""Results of the weight plan that are kept on disk: right for the values they were made from, or derived again."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy import cli
from cannopy.backend.build import CacheWarning, build
from cannopy.backend.cache import list_entries, tensors_file, verify, weight_sets
from cannopy.backend.cache.prune import Wanted, remove
from cannopy.fx_passes.program import WeightEntry
from tests.backend.programs import (
    Tiny,
    check_same_as_eager,
    compile_tiny,
    eager,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)
from tests.cache_faults.kills import start_together, wait


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weights that are derived, as they are."""
    names: list[str] = []
    original = WeightEntry.build
    monkeypatch.setattr(WeightEntry, "build", lambda self, tensors: names.append(self.name) or original(self, tensors))
    return names


def start(folder: Path, seed: int = 0, **changes: Any):
    """A compiled `Tiny` whose weights are kept, checked against eager."""
    model = tiny(seed)
    compiled, x, cache = compile_tiny(model, eager(folder, keep_weights=True, **changes))
    check_same_as_eager(compiled, model, x, cache)
    return compiled, model, (x, cache)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(".weights-*/*.safetensors"))


def test_a_restart_maps_them(tmp_path: Path, built: list[str]) -> None:
    first = start(tmp_path)[0]
    assert len(files(tmp_path)) == 1
    assert first.weight_memory.mapped_bytes == 0
    value = first._generated.instance.w.clone()
    del first, built[:]
    gc.collect()
    compiled = start(tmp_path)[0]
    assert compiled.report["cache"]["status"] == "hit"
    assert built == []
    assert compiled.weight_memory.mapped_bytes == compiled.weight_memory.bytes == value.nbytes
    assert torch.equal(compiled._generated.instance.w, value)


def test_without_the_option_nothing_is_kept_or_read(tmp_path: Path, built: list[str]) -> None:
    compile_tiny(tiny(), eager(tmp_path))
    assert files(tmp_path) == []
    start(tmp_path)
    del built[:]
    compiled = compile_tiny(tiny(), eager(tmp_path))[0]
    assert built == ["w"]
    assert compiled.weight_memory.mapped_bytes == 0


def test_other_values_are_another_set(tmp_path: Path, built: list[str]) -> None:
    for seed in (0, 1, 0, 1):
        del built[:]
        compiled = start(tmp_path, seed)[0]
    assert built == []
    assert compiled.report["cache"]["status"] == "hit"
    assert len(files(tmp_path)) == 2
    (entry,) = list_entries(tmp_path)
    assert (entry.weight_sets, entry.weight_bytes) == (2, sum(p.stat().st_size for p in files(tmp_path)))


def test_one_bit_of_a_source_is_another_set(tmp_path: Path, built: list[str]) -> None:
    start(tmp_path)
    model = tiny()
    model.proj.weight.data.view(torch.int32)[3, 5] ^= 1
    del built[:]
    compiled, x, cache = compile_tiny(model, eager(tmp_path, keep_weights=True))
    assert "w" in built
    check_same_as_eager(compiled, model, x, cache)


def test_a_write_into_a_mapped_weight_stays_in_the_process(tmp_path: Path) -> None:
    start(tmp_path)
    before = files(tmp_path)[0].read_bytes()
    compiled, model, call = start(tmp_path)
    with torch.no_grad():
        model.proj.weight.mul_(-3)
    check_same_as_eager(compiled, model, *call, atol=1e-5)
    model.proj.weight.data.add_(1)
    compiled.refresh_weights()
    check_same_as_eager(compiled, model, *call, atol=1e-5)
    model.load_state_dict(tiny(5).state_dict(), assign=True)
    check_same_as_eager(compiled, model, *call, atol=1e-5)
    assert files(tmp_path)[0].read_bytes() == before
    start(tmp_path)


def test_two_methods_have_one_copy(tmp_path: Path) -> None:
    """Neither the second method nor a third instance writes into pages that are mapped."""
    start(tmp_path)
    model = tiny()
    options = [eager(tmp_path, keep_weights=True, text=text) for text in ("", "phase=decode")]
    first, second = (compile_tiny(model, o)[0] for o in options)
    assert first.weight_memory.mapped_bytes > 0
    assert second.weight_memory.bytes == 0
    assert second.weight_memory.shared_bytes == first.weight_memory.bytes
    weight = first._generated.instance.w
    assert second._generated.instance.w is weight
    assert weight._version == 0


def test_a_write_that_torch_does_not_count_is_seen_at_the_next_compilation(tmp_path: Path) -> None:
    compiled, model, call = start(tmp_path)
    model.proj.weight.data.add_(1)
    other = compile_tiny(model, eager(tmp_path, keep_weights=True, text="phase=decode"))[0]
    check_same_as_eager(other, model, *call, atol=1e-5)
    check_same_as_eager(compiled, model, *call, atol=1e-5)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def forged(path: Path) -> None:
    """Another shape under digests of the values that are right."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape": [16, 8]', b'"shape": [8, 16]'))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: os.truncate(p, p.stat().st_size - 64), "bytes, its header says"),
    "truncated to a header": (lambda p: os.truncate(p, 100), "no readable header"),
    "empty": (lambda p: os.truncate(p, 0), "cannot be mapped"),
    "length": (lambda p: flip(p, 7), "no readable header"),
    "value": (lambda p: flip(p, p.stat().st_size - 300), "w was changed after it was written"),
    "shape": (forged, "its header was changed"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes, its header says"),
    "others may write": (lambda p: p.chmod(0o622), "can be written by everybody"),
    "link": (linked, "is a symbolic link"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is no file"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "is no file"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_set_is_derived_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], Any], reason: str
) -> None:
    start(tmp_path)
    gc.collect()
    (path,) = files(tmp_path)
    damage(path)
    compiled = start(tmp_path)[0]
    assert compiled.report["cache"]["status"] == "hit"
    assert compiled.weight_memory.mapped_bytes == 0
    assert reason in caplog.text
    if path.is_file():
        del compiled
        gc.collect()
        assert start(tmp_path)[0].weight_memory.mapped_bytes > 0


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    start(tmp_path)
    assert [e.problem for e in verify(tmp_path)] == [None]
    (path,) = files(tmp_path)
    flip(path, path.stat().st_size - 300)
    assert [e.problem for e in list_entries(tmp_path)] == [None]
    (problem,) = [e.problem for e in verify(tmp_path)]
    assert problem == f"kept weights {path.name}: w was changed after it was written"


def test_prune_takes_sets_with_their_entry_and_none_in_use(tmp_path: Path) -> None:
    compiled = start(tmp_path)[0]
    del compiled
    compiled = start(tmp_path)[0]
    gc.collect()
    assert [r.kept for r in remove(tmp_path, Wanted(older_than=0.0))] == ["in use"]
    (path,) = files(tmp_path)
    assert weight_sets.remove(path) == "in use"
    del compiled
    gc.collect()
    assert [r.kept for r in remove(tmp_path, Wanted(older_than=0.0))] == [""]
    assert list(tmp_path.glob(".weights-*")) == []


def test_old_weights_go_and_the_last_stay(tmp_path: Path) -> None:
    for seed in range(3):
        start(tmp_path, seed)
        for path in files(tmp_path):
            os.utime(path, (path.stat().st_mtime - 60,) * 2)
    start(tmp_path, 1)
    gc.collect()
    last = weight_sets.sets(list_entries(tmp_path)[0].path)[0].path
    dry = remove(tmp_path, Wanted(old_weights=True), dry_run=True)
    assert len(files(tmp_path)) == 3
    done = remove(tmp_path, Wanted(old_weights=True))
    assert [r.path for r in dry] == [r.path for r in done]
    assert files(tmp_path) == [last]
    assert len(list_entries(tmp_path)) == 1


def test_the_command_line_says_what_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        start(tmp_path, seed)
    gc.collect()
    size = sum(p.stat().st_size for p in files(tmp_path))
    where = ["--cache-dir", str(tmp_path)]
    assert cli.main(["cache", "ls", *where, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["weight_sets"], entry["weight_bytes"]) == (2, size)
    assert entry["bytes"] > size
    assert cli.main(["cache", "show", "Tiny", *where]) == 0
    assert f"of it {size / 1e3:.1f} kB in 2 sets of derived weights" in capsys.readouterr().out
    assert cli.main(["cache", "prune", "--old-weights", *where]) == 0
    assert "weights of other values were used later" in capsys.readouterr().out
    assert len(files(tmp_path)) == 1


def test_sets_without_an_entry_go(tmp_path: Path) -> None:
    start(tmp_path)
    gc.collect()
    (entry,) = list_entries(tmp_path)
    entry.path.rename(tmp_path / ".aside-x")
    assert [r.why for r in remove(tmp_path, Wanted(stale=True))] == ["its entry is gone"]
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    original = tensors_file.write
    monkeypatch.setattr(tensors_file, "write", full)
    with pytest.warns(CacheWarning, match="derived weights are not kept .*No space left"):
        start(tmp_path)
    assert files(tmp_path) == []
    assert list(tmp_path.glob(".weights-*/*")) == []
    monkeypatch.setattr(tensors_file, "write", original)
    assert start(tmp_path)[0].report["cache"]["status"] == "hit"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    start(tmp_path)
    (path,) = files(tmp_path)
    path.parent.chmod(0o777)
    with pytest.warns(CacheWarning, match="can be written by everybody"):
        assert start(tmp_path)[0].weight_memory.mapped_bytes == 0


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    start(tmp_path)
    left = files(tmp_path)[0].with_name(".tmp-abc-1-0")
    left.write_bytes(b"x")
    os.utime(left, (time.time() - 3600,) * 2)
    start(tmp_path, seed=1)
    assert not left.exists()


def chained(model: Tiny, folder: Path):
    """Two steps, an alias, a scalar, one without sources."""
    program = tiny_program(model, *example())
    program.weights[:] = [WeightEntry("half", ("weight",), "w[0] * 4"), WeightEntry("w", ("half",), "(w[0] / 2).t()")]
    found = look(model, example(), eager(folder, keep_weights=True))
    if found.compiled is None:
        return build(program, model, "forward", example(), {}, eager(folder, keep_weights=True), found, {}, make_output)
    return found.compiled


def test_what_only_leads_to_a_kept_weight_is_not_derived(tmp_path: Path, built: list[str]) -> None:
    chained(tiny(), tmp_path)
    gc.collect()
    del built[:]
    model = tiny()
    compiled = chained(model, tmp_path)
    assert built == []
    check_same_as_eager(compiled, model, *example())
    with torch.no_grad():
        model.proj.weight.neg_()
    check_same_as_eager(compiled, model, *example())
    assert built == ["half", "w"]


def test_a_file_that_other_tools_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    compiled = start(tmp_path)[0]
    (path,) = files(tmp_path)
    assert torch.equal(safetensors.load_file(path)["w"], compiled._generated.instance.w)
    odd = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(2, 3).bfloat16(), "c": torch.tensor([True])}
    with open(tmp_path / "odd", "w+b") as f:
        assert tensors_file.write(f.fileno(), odd.items(), odd) == 3
        found, _ = tensors_file.read(f.fileno())
    assert all(torch.equal(found[n], t) for n, t in odd.items())
    assert all(t.data_ptr() % 64 == 0 for t in found.values())
    json.dumps(list(safetensors.load_file(tmp_path / "odd")))


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    def work(seed: int) -> Callable[[], None]:
        return lambda: start(tmp_path, seed) and None

    for _ in range(2):
        assert [wait(pid) for pid in start_together([work(seed) for seed in (0, 1, 0, 1)])] == [0] * 4
    assert len(files(tmp_path)) == 2
    assert [e.problem for e in verify(tmp_path)] == [None]
    assert list(tmp_path.glob(".weights-*/.tmp-*")) == []
