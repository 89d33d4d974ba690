"""One change at a time: what decides a compilation misses and is named, what does not is a hit."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cannopy.backend.host import target as host_target
from cannopy.backend.options import BuildOptions
from tests.backend.changing import SOURCE, identity, load
from tests.backend.processes import ROOT
from tests.backend.programs import compile_tiny, eager, example, look, tiny

key = sys.modules["cannopy.backend.cache.key"]
CODE = r"code \(user_model\."

# what is replaced in the file, by what, and what the reason says
EDITS: dict[str, tuple[str, str, str]] = {
    "module constant": ("LIMIT = 1.5", "LIMIT = 1.25", CODE + r"LIMIT: 1\.5 -> 1\.25"),
    "dtype constant": (
        "WIDE = torch.float32",
        "WIDE = torch.float16",
        CODE + r"WIDE: torch\.float32 -> torch\.float16",
    ),
    "table": ('"up": 2', '"up": 3', CODE + "TABLE"),
    "list in a table": ("[3, 4]", "[4, 3]", CODE + "TABLE"),
    "function in a table": ("x + 1}", "x + 2}", CODE),
    "alias of a torch function": ("ACT = F.silu", "ACT = F.relu", CODE + r"ACT: function torch\S*silu.* -> .*relu"),
    "object": ("depth=1", "depth=2", CODE + "SETTINGS"),
    "decorator's argument": ("@decorate(2)", "@decorate(3)", CODE + "helper"),
    "decorator": ("f(*args) * times", "f(*args) + times", CODE),
    "callee": ("x * LIMIT + bias", "x * LIMIT - bias", CODE + r"helper: [^;]* -> [^;]*\)$"),
    "default argument": ("bias=1.0", "bias=2.0", CODE + "helper"),
    "keyword default": ("gain=1.0", "gain=2.0", CODE + "helper"),
    "closure": ("gate(3.0)", "gate(4.0)", CODE + "gate"),
    "partial": ("max=6.0", "max=7.0", CODE + "CLIP"),
    "method": (
        "def inner(self, x):\n        return self",
        "def inner(self, x):\n        return -self",
        CODE + r"Block\.inner",
    ),
    "property": ("return 0.5", "return 0.25", CODE + r"Block\.scale"),
    "static method": ("return -x", "return +x", CODE + r"Block\.rotate"),
    "class attribute": ("width = 4", "width = 5", CODE + r"Block\.width: 4 -> 5"),
    "object on a class": ("eps = 1e-6", "eps = 1e-5", CODE),
    "method of it": ("x + self.eps", "x - self.eps", CODE + r"Norm\.__call__"),
    "name put together": (
        "def attend_short(x):\n    return x",
        "def attend_short(x):\n    return x * 2",
        CODE + "attend_short",
    ),
    "config field": ("top_k: int = 2", "top_k: int = 4", r"config \(self\.config\.top_k: 2 -> 4\)"),
    "nested config": ("10000.0", "500.0", r"config \(self\.config\.rope\['theta'\]: 10000\.0 -> 500\.0\)"),
    "enum": ("= Kind.ONE", "= Kind.TWO", r"config \(self\.config\.kind: Kind\.ONE = 1 -> Kind\.TWO = 2\)"),
    "partial in an attribute": ('"tanh"', '"none"', r"attributes \(self\.layers\.0\.act of: .* -> "),
    "lambda in an attribute": ("lambda x: x * 2", "lambda x: x * 3", "attributes|code"),
    "nested attribute": ('"window": 3', '"window": 4', r"attributes \(self\.layers\.0"),
    "layers": ("layers=2", "layers=3", r"parameters \(layers\.2\.proj\.weight: absent -> parameter float32\[8, 8\]"),
}

SAME: dict[str, tuple[str, str]] = {
    "comment": ("# a comment", "# another one, on\n        # two lines"),
    "line numbers": ("import enum", "\n\n\n\nimport enum"),
    "blank lines": ("def gate(scale):\n", "def gate(scale):\n\n\n"),
    "docstring": ('"""What it adds."""', '"""What it adds to what.\n\n    At length.\n    """'),
    "no docstring": ('    """What it adds."""\n', ""),
    "docstring of a class": ('"""One layer."""', '"""A layer, nothing else."""'),
    "docstring where there was none": ("def gate(scale):\n", 'def gate(scale):\n    """Scaled."""\n'),
}


def swap(module: Any) -> None:
    module.pre, module.act = module.act, module.pre


def tie(m: Any, mp: Any) -> None:
    m.layers[1].proj.weight = m.layers[0].proj.weight


OBJECTS: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "attribute": (
        lambda m, mp: setattr(m.layers[1], "options", {"window": 9}),
        r"attributes \(self\.layers\.1\.options: ",
    ),
    "functions swapped": (lambda m, mp: swap(m.layers[0]), r"attributes \(self\.layers\.0"),
    "dtype": (lambda m, mp: m.bfloat16(), r"parameters \(layers\.0\.proj\.weight: .*float32\S* .*bfloat16\["),
    "shape": (
        lambda m, mp: setattr(m.layers[0].proj, "weight", nn.Parameter(torch.zeros(8, 4))),
        r"parameters \(layers\.0\.proj\.weight: .*\[8, 8\].* -> .*\[8, 4\]",
    ),
    "stride": (
        lambda m, mp: setattr(m.layers[0].proj, "weight", nn.Parameter(torch.zeros(8, 8).t())),
        r"\(8, 1\) device -> .*\(1, 8\) device",
    ),
    "device": (lambda m, mp: m.to("meta"), r"target \(weights: there -> not there\)"),
    "buffer, not parameter": (
        lambda m, mp: (delattr(m, "table"), setattr(m, "table", nn.Parameter(torch.zeros(4)))),
        r"parameters \(table: buffer .* -> parameter ",
    ),
    "tied": (tie, r"parameters \(layers\.1\.proj\.weight: .* tied to layers\.0"),
    "hook": (lambda m, mp: m.layers[0].register_forward_hook(lambda *a: None), r"self\.layers\.0"),
    "training": (lambda m, mp: m.train(), r"attributes \(self\.layers\.training: False -> True; .* and 3 more\)"),
    "training of one": (lambda m, mp: m.layers[1].train(), r"attributes \(self\.layers\.1\.training: "),
    "forward of one object": (lambda m, mp: setattr(m.layers[0], "forward", lambda x, k=None: x), r"self\.layers\.0"),
    "method on the class": (lambda m, mp: mp.setattr(type(m.layers[0]), "inner", lambda s, x: x), r"code \("),
    "python": (
        lambda m, mp: mp.setattr("platform.python_version", lambda: "3.99.0"),
        r"versions \(python: 3\.\S+ -> 3\.99\.0\)",
    ),
    "torch": (lambda m, mp: mp.setattr(torch, "__version__", "9.9"), r"versions \(torch: \S+ -> 9\.9\)"),
    "torch_npu": (
        lambda m, mp: mp.setattr(sys.modules["torch_npu"], "__version__", "9.9"),
        r"versions \(torch_npu: \S+ -> 9\.9\)",
    ),
    "torchair": (
        lambda m, mp: mp.setattr(importlib.metadata, "version", lambda n: {"torchair": "7.1"}[n]),
        r"versions \(torchair: absent -> 7\.1\)",
    ),
    "CANN": (
        lambda m, mp: mp.setattr(host_target, "TARGETS", {n: replace(t, cann="9.9.RC1")
                                                          for n, t in host_target.TARGETS.items()}),
        r"versions \(cann: \S* -> 9\.9\.RC1\)",
    ),
    "SoC": (
        lambda m, mp: (
            mp.setattr(torch.npu, "is_available", lambda: True),
            mp.setattr(torch.npu, "get_device_name", lambda: "Ascend910_9999"),
        ),
        r"target \(device: \S+ -> Ascend910_9999",
    ),
    "world": (
        lambda m, mp: (
            mp.setattr(torch.distributed, "is_initialized", lambda: True),
            mp.setattr(torch.distributed, "get_world_size", lambda: 8),
            mp.setattr(torch.distributed, "get_rank", lambda: 3),
            mp.setattr(torch.distributed, "get_backend", lambda: "gloo"),
        ),
        r"topology \(.*world: 1 -> 8",
    ),
    "engine or rule source": (
        lambda m, mp: (
            mp.setattr(key, "package_digest", lambda: "other"),
            mp.setattr(key, "file_digests", lambda: {**FILES, "cannopy.fusion_rules/lift/rotary.py": "00"}),
        ),
        r"package \(cannopy\.fusion_rules/lift/rotary\.py: \w+ -> 00\)",
    ),
    "own environment": (lambda m, mp: mp.setenv("USER_FAST", "1"), r"code \(environment USER_FAST: None -> '1'\)"),
    "torchair's environment": (
        lambda m, mp: mp.setenv("AUTOFUSE_FLAGS", "--all"),
        r"environment \(AUTOFUSE_FLAGS: absent -> '--all'\)",
    ),
    "attention kernels": (
        lambda m, mp: mp.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False),
        "torch state .*attention kernels",
    ),
    "deterministic": (
        lambda m, mp: mp.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
        "torch state .*deterministic",
    ),
    "default dtype": (
        lambda m, mp: mp.setattr(torch, "get_default_dtype", lambda: torch.half),
        "torch state .*float16",
    ),
    "autocast": (lambda m, mp: mp.setattr(torch, "is_autocast_enabled", lambda d: True), "torch state .*autocast"),
}
FILES: dict[str, str] = {}

X = torch.zeros(2, 8)
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "shape of an input": ({"args": (torch.zeros(3, 8),)}, r"inputs \(args\[0\]: float32\[2, 8\]"),
    "dtype of an input": ({"args": (X.half(),)}, r"inputs \(args\[0\]: .* -> float16"),
    "stride of an input": ({"args": (torch.zeros(8, 2).t(),)}, r"inputs \(args\[0\]: .*\(8, 1\) device -> .*\(1, 2\)"),
    "keyword form": ({"args": (), "kwargs": {"x": X}}, r"method \(form"),
    "none given": ({"args": (X, None)}, r"method \(form"),
    "a tensor, not none": ({"args": (X, X + 1)}, r"method \(form"),
    "flag": ({"kwargs": {"flag": True}}, "inputs|method"),
    "method": ({"method": "prefill"}, r"method \(name: forward -> prefill\)"),
    "phase": ({"options": eager(text="phase=decode")}, r"options \(phase: absent -> decode\)"),
    "fusion switch": ({"options": eager(text="fuse.mla_prolog=off")}, r"options \(fuse\.mla_prolog: absent -> off\)"),
    "block size": ({"options": eager(text="block_size=128")}, r"options \(block_size: absent -> 128\)"),
    "rule of a plugin": (
        {"options": eager(text="code of rule silu=12ab")},
        r"options \(code of rule silu: absent -> 12ab",
    ),
    "plan": ({"options": eager(text="plan file=77")}, r"options \(plan file: absent -> 77\)"),
    "target": ({"options": replace(eager(), target="atlas-a2")}, r"target \(device: Ascend910_9391 -> Ascend910B1\)"),
    "engine": ({"options": BuildOptions(use_cache=False)}, r"options \(engine: eager -> torchair\)"),
    "torchair's option": (
        {"options": eager(compiler={**eager().compiler, "mode": "x"})},
        r"options \(mode: max-autotune -> x\)",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkout"
    sys.modules.pop("user_model", None)


def reason(old: Any, new: Any) -> str:
    assert old.key != new.key
    return ", ".join(key.differences(old, new))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_misses_and_is_named(folder: Path, name: str) -> None:
    old, new, message = EDITS[name]
    assert SOURCE.count(old) == 1
    before = identity(load(folder).Model())
    found = reason(before, identity(load(folder, SOURCE.replace(old, new)).Model()))
    assert re.search(message, found), found


@pytest.mark.parametrize("name", SAME)
def test_an_edit_that_changes_nothing_hits(folder: Path, name: str) -> None:
    old, new = SAME[name]
    assert SOURCE.count(old) == 1
    before = identity(load(folder).Model())
    assert identity(load(folder, SOURCE.replace(old, new)).Model()).key == before.key


@pytest.mark.parametrize("name", OBJECTS)
def test_another_model_or_machine_misses_and_is_named(folder: Path, monkeypatch, name: str) -> None:
    change, message = OBJECTS[name]
    FILES.update(key.file_digests())
    model = load(folder).Model()
    before = identity(model)
    change(model, monkeypatch)
    found = reason(before, identity(model))
    assert re.search(message, found), found


@pytest.mark.parametrize("name", CALLS)
def test_another_call_misses_and_is_named(folder: Path, name: str) -> None:
    changes, message = CALLS[name]
    model = load(folder).Model()
    found = reason(identity(model), identity(model, **changes))
    assert re.search(message, found), found


def test_where_things_are_does_not_count(tmp_path: Path, monkeypatch) -> None:
    """Other checkout, other file name, other home, touched files, other process, hash seed and working folder."""
    before = identity(load(tmp_path / "a").Model())
    os.utime(tmp_path / "a" / "user_model.py", (1, 1))
    assert identity(load(tmp_path / "a").Model()).key == before.key
    monkeypatch.setenv("HOME", str(tmp_path / "home of 用户"))
    assert identity(load(tmp_path / "b c" / "d").Model()).key == before.key
    assert identity(load(tmp_path / "e", file="renamed.py").Model()).key == before.key
    other = subprocess.run(
        [sys.executable, "-m", "tests.backend.changing", str(tmp_path / "f")],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert other.stdout.split()[-1] == before.key


def test_values_states_and_modes_of_the_process_do_not_count(folder: Path) -> None:
    model = load(folder).Model()
    before = identity(model)
    with torch.no_grad():
        model.layers[0].proj.weight.add_(1)
    assert identity(model, args=(torch.ones(2, 8),)).key == before.key
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert identity(model).key == before.key
    model.requires_grad_(False)
    assert identity(model).key == before.key
    model(X)
    assert identity(load(folder).Model()).key == before.key


def test_requires_grad_counts_where_code_reads_it(folder: Path) -> None:
    source = SOURCE.replace("return x\n\n    def prefill", "return x + x.requires_grad\n\n    def prefill")
    model = load(folder, source).Model()
    before = identity(model)
    model.requires_grad_(False)
    assert "requires grad -> " in reason(before, identity(model))


def test_the_reason_reaches_the_user(tmp_path: Path) -> None:
    """Through the cache on disk: hit, miss with the reason, hit again when the change is taken back."""
    options = eager(tmp_path)
    compile_tiny(tiny(), options)
    model = tiny(3)
    assert look(model, example(), options).status == "hit"
    model.factor = 3.0
    found = look(model, example(), options)
    assert (found.status, found.compiled) == ("miss", None)
    assert found.reason == "changed: attributes (self.factor: 2.0 -> 3.0)"
    if found.lock is not None:
        found.lock.release("")
    model.factor = 2.0
    assert look(model, example(), options).status == "hit"
