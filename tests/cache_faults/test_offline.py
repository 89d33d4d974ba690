"""A folder that was filled without weights is copied elsewhere and hits there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cannopy.backend.artifact import Fingerprint
from cannopy.backend.build import build
from cannopy.backend.cache import key, list_entries
from cannopy.backend.options import BuildOptions
from cannopy.backend.runtime import CompiledModel
from cannopy.frontend import sources
from tests.backend.programs import (
    Cache,
    Tiny,
    check_same_as_eager,
    eager,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)


def compiled_without_weights(cache: Path, engine: Literal["torchair", "eager"] = "torchair") -> CompiledModel:
    model = tiny().to("meta")
    x, state = example()
    call = (x.to("meta"), Cache(state.keys.to("meta")))
    options = BuildOptions(cache_dir=cache, engine=engine)
    found = look(model, call, options)
    with found:
        program = tiny_program(model, *call)
        return build(program, model, "forward", call, {}, options, found, {}, make_output)


def test_a_copied_folder_hits_and_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_without_weights(tmp_path / "made here")
    copy = tmp_path / "elsewhere" / "cache"
    shutil.copytree(tmp_path / "made here", copy)
    shutil.rmtree(tmp_path / "made here")
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    model = tiny()
    found = look(model, example(), BuildOptions(cache_dir=copy))
    assert found.status == "hit", found.reason
    assert found.compiled is not None
    for _ in range(2):
        check_same_as_eager(found.compiled, model, *example())
    with pytest.raises(ValueError, match="float64"):
        found.compiled(example()[0].double(), example()[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "2.14.0"}, "torch: 2.13.0+cpu -> 2.14.0"),
        ({"cann": "9.1.0"}, "cann: 9.0.0 -> 9.1.0"),
        ({"machine": "aarch64"}, "machine: x86_64 -> aarch64"),
        ({"python": "3.12.1"}, "-> 3.12.1"),
    ],
)
def test_what_differs_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], reason: str
) -> None:
    compiled_eagerly = BuildOptions(cache_dir=tmp_path, engine="eager")
    here = {"torch": "2.13.0+cpu", "machine": "x86_64", "python": "3.11.7"}
    monkeypatch.setattr(key, "versions", lambda packages=None: here)
    monkeypatch.setattr(key, "_chip", lambda options: _Chip("9.0.0"))
    model, call = tiny(), example()
    found = look(model, call, compiled_eagerly)
    with found:
        build(tiny_program(model, *call), model, "forward", call, {}, compiled_eagerly, found, {}, make_output)
    monkeypatch.setattr(key, "versions", lambda packages=None: here | change)
    monkeypatch.setattr(key, "_chip", lambda options: _Chip(change.get("cann", "9.0.0")))
    miss = look(model, call, compiled_eagerly)
    assert miss.status == "miss"
    assert reason in miss.reason


class _Chip:
    def __init__(self, cann: str) -> None:
        self.cann, self.device_name = cann, "Ascend910_9391"


def test_a_device_has_the_key_of_the_host_that_lowered_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a host can show it: the NPU's answers are put in its place."""
    model = tiny().to("meta")
    x, state = example()
    call = (x.to("meta"), Cache(state.keys.to("meta")))
    host = key.fingerprint(model, "forward", call, {}, BuildOptions(target="atlas-a3"))
    real = key.versions
    monkeypatch.setattr(torch.npu, "is_available", lambda: True)
    monkeypatch.setattr(torch.npu, "get_device_name", lambda *_: "Ascend910_9391")
    monkeypatch.setattr(key, "versions", lambda packages=None: {**real(packages), "cann": "9.0.0"})
    device = key.fingerprint(model, "forward", call, {}, BuildOptions(target="atlas-a3"))
    assert key.differences(host, device) == []
    monkeypatch.setattr(torch.npu, "get_device_name", lambda *_: "Ascend910_9382")
    other = key.fingerprint(model, "forward", call, {}, BuildOptions(target="atlas-a3"))
    assert key.differences(host, other) == ["target (device: Ascend910_9391 -> Ascend910_9382)"]


def test_what_only_the_eager_engine_can_run_does_not_hit_without_its_device(tmp_path: Path) -> None:
    compiled_without_weights(tmp_path, "eager")
    assert len(list_entries(tmp_path)) == 1
    found = look(tiny(), example(), eager(tmp_path))
    assert found.status == "miss"
    assert "target (weights: not there -> there)" in found.reason


def test_a_checkpoint_has_the_key_of_its_config(tmp_path: Path) -> None:
    """`from_pretrained` leaves more on a model than building it on the meta device does."""
    sources.load("qwen3-moe").model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    for phase in ("decode", "prefill"):
        found = []
        for weights in (True, False):
            loaded = sources.load(str(tmp_path), weights=weights)
            args, kwargs = loaded.make_inputs(phase)
            found.append(key.fingerprint(loaded.model, "forward", args, kwargs, BuildOptions()))
        assert loaded.model.lm_head.weight.is_meta
        assert key.differences(*found) == []
        assert found[0].key == found[1].key


def test_what_loading_leaves_counts_where_code_reads_it() -> None:
    class Reads(Tiny):
        def forward(self, x: torch.Tensor, cache: Cache, flag: bool = False, mask: Any = None) -> dict[str, Any]:
            return super().forward(x * self.generation_config["scale"], cache)

    def identity(kind: type[Tiny], scale: float) -> Fingerprint:
        model = kind()
        model.generation_config = {"scale": scale}
        return key.fingerprint(model, "forward", example(), {}, eager())

    assert identity(Tiny, 1.0).key == identity(Tiny, 2.0).key
    changed = key.differences(identity(Reads, 1.0), identity(Reads, 2.0))
    assert changed == ["attributes (self.generation_config['scale']: 1.0 -> 2.0)"]
