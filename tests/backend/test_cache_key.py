"""The key covers what decides a compilation, and a miss says what changed."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import cannopy.backend.cache.store  # noqa: F401
from cannopy.backend.cache.text import code_text
from cannopy.backend.options import BuildOptions
from tests.backend.programs import Cache, eager, example, tiny

key = sys.modules["cannopy.backend.cache.key"]


def identity(model, args, kwargs=None, options=None):
    return key.fingerprint(model, "forward", args, kwargs or {}, options or eager())


def other_forward(self, x, cache, flag=False, mask=None):
    return {"y": x + 1, "cache": cache}


def rows(n: int) -> tuple[torch.Tensor, Cache]:
    return torch.randn(n, 16), Cache(torch.randn(1, 4, 8))


CHANGES: dict[str, tuple[str, Any]] = {
    "attribute": ("attributes", lambda m, mp: setattr(m, "factor", 3.0)),
    "attribute of a child": ("attributes", lambda m, mp: setattr(m.proj, "out_features", 9)),
    "new attribute": ("attributes", lambda m, mp: setattr(m, "extra", [1, {"a": None}])),
    "train mode": ("attributes", lambda m, mp: m.train()),
    "forward on the class": ("code", lambda m, mp: mp.setattr(type(m), "forward", other_forward)),
    "forward on the object": ("code", lambda m, mp: setattr(m, "forward", types.MethodType(other_forward, m))),
    "hook": ("code", lambda m, mp: m.proj.register_forward_hook(lambda *a: None)),
    "dtype": ("parameters", lambda m, mp: m.to(torch.bfloat16)),
    "stride": ("parameters", lambda m, mp: setattr(m.proj, "weight", torch.nn.Parameter(torch.randn(16, 8).t()))),
    "tie": ("parameters", lambda m, mp: setattr(m.proj, "again", m.proj.weight)),
    "buffer": ("parameters", lambda m, mp: m.register_buffer("more", torch.zeros(1))),
    "torch version": ("versions", lambda m, mp: mp.setattr(torch, "__version__", "9.9")),
    "default dtype": ("torch state", lambda m, mp: mp.setattr(torch, "get_default_dtype", lambda: torch.float16)),
    "package": ("package", lambda m, mp: mp.setattr(key, "package_digest", lambda: "other")),
}


@pytest.mark.parametrize(("field", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_named(monkeypatch, field: str, change) -> None:
    model = tiny()
    before = identity(model, example())
    assert identity(model, example()).key == before.key
    change(model, monkeypatch)
    after = identity(model, example())
    assert after.key != before.key
    assert any(line.startswith(field) for line in key.differences(before, after))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (rows(5), {}),
        ((example()[0].double(), example()[1]), {}),
        ((example()[0].t().contiguous().t(), example()[1]), {}),
        ((example()[0], Cache(torch.randn(1, 8, 8))), {}),
        (example(), {"flag": True}),
        (example(), {"mask": None}),
        ((example()[0],), {"cache": example()[1]}),
    ],
)
def test_inputs_count_by_layout_and_value(args, kwargs) -> None:
    model = tiny()
    a, b = identity(model, example()), identity(model, args, kwargs)
    assert a.key != b.key
    assert any(line.startswith(("inputs", "method")) for line in key.differences(a, b))


def test_values_of_tensors_do_not_count() -> None:
    a = identity(tiny(0), example())
    x, cache = example()
    assert identity(tiny(7), (x + 1, Cache(cache.keys * 2))).key == a.key


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "phase=decode"},
        {"engine": "torchair"},
        {"compiler": {"mode": "reduce-overhead"}},
        {"target": "atlas-a2"},
    ],
)
def test_options_count(changes) -> None:
    a = identity(tiny(), example(), options=eager())
    b = identity(tiny(), example(), options=replace(eager(), **changes))
    assert a.key != b.key
    assert any(line.startswith(("options", "target")) for line in key.differences(a, b))


def test_cache_folder_does_not_count(tmp_path) -> None:
    options = BuildOptions(cache_dir=tmp_path)
    assert identity(tiny(), example(), options=options).key == identity(tiny(), example(), options=BuildOptions()).key


def test_the_line_of_the_options_is_named() -> None:
    a = identity(tiny(), example(), options=eager(text="phase=decode\nfuse=mla"))
    b = identity(tiny(), example(), options=eager(text="phase=prefill\nfuse=mla"))
    assert any("phase: decode -> prefill" in line for line in key.differences(a, b))


def make_module(source: str, name: str = "user_model") -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


USER = """
import torch
LIMIT = {limit}
def helper(x): return x * {scale}
def gate(scale={default}):
    def apply(x): return helper(x) + scale + LIMIT
    return apply
TABLE = {{"gate": gate()}}
class Model(torch.nn.Module):
    width = {width}
    def forward(self, x): return self.inner(x)
    def inner(self, x): return TABLE["gate"](x) + {name}.width
"""
FORM = {"limit": 1, "scale": 2, "default": 3, "width": 4, "name": "Model"}


@pytest.mark.parametrize("change", ["limit", "scale", "default", "width"])
def test_code_is_followed_through_helpers_closures_and_tables(change: str) -> None:
    x = torch.zeros(1)
    a = identity(make_module(USER.format(**FORM)).Model(), (x,))
    b = identity(make_module("\n\n# a comment" + USER.format(**FORM)).Model(), (x,))
    c = identity(make_module(USER.format(**{**FORM, change: 9})).Model(), (x,))
    assert a.key == b.key
    assert a.key != c.key
    assert all(line.startswith("code") for line in key.differences(a, c))


def test_code_of_the_arguments_counts(monkeypatch) -> None:
    @dataclass
    class Store:
        keys: torch.Tensor

        def update(self, x):
            return self.keys + x

    class Model(torch.nn.Module):
        def forward(self, store, x):
            return store.update(x)

    call = (Store(torch.zeros(2)), torch.zeros(2))
    before = identity(Model(), call)
    monkeypatch.setattr(Store, "update", lambda self, x: self.keys - x)
    assert any(
        line.startswith("code") and "update" in line for line in key.differences(before, identity(Model(), call))
    )


def test_code_text_has_no_addresses_or_order_of_sets() -> None:
    code = compile("lambda x: x in {'a', 'b', 'c', (1, 'z')}", "<s>", "eval")
    assert "0x" not in code_text(code)
    assert code_text(code) == code_text(compile("\n\nlambda x: x in {'c', (1, 'z'), 'b', 'a'}", "<t>", "eval"))


def test_cycles_and_shared_objects() -> None:
    model = tiny()
    model.loop = {"self": None}
    model.loop["self"] = model.loop
    model.also = model.loop
    first = identity(model, example())
    assert identity(model, example()).key == first.key
    model.also = {"self": None}
    assert identity(model, example()).key != first.key


def test_config_entries_are_named_and_its_origin_is_not() -> None:
    class Config:
        model_type = "tiny"

        def __init__(self, **kw):
            self.kw = kw

        def to_dict(self):
            return dict(self.kw)

    def with_config(**kw):
        model = tiny()
        model.config = Config(**kw)
        return identity(model, example())

    a = with_config(top_k=2, _name_or_path="a")
    assert with_config(top_k=2, _name_or_path="b").key == a.key
    assert any("top_k" in line and "2 -> 4" in line for line in key.differences(a, with_config(top_k=4)))


def test_package_digest_covers_names_and_contents(tmp_path, monkeypatch) -> None:
    monkeypatch.undo()
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "c.yaml").write_text("k: 1")
    monkeypatch.setattr(key, "_package_files", lambda: [(p.name, p) for p in tmp_path.iterdir()])
    seen = {key.package_digest()}
    (tmp_path / "a.py").write_text("x = 2")
    seen.add(key.package_digest())
    (tmp_path / "c.yaml").write_text("k: 2")
    seen.add(key.package_digest())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    seen.add(key.package_digest())
    assert len(seen) == 4


def test_package_files_are_those_of_every_package() -> None:
    names = {name for name, _ in key._package_files()}
    assert {"cannopy.backend/cache/key.py", "cannopy.fx_passes/program.py", "cannopy/__init__.py"} <= names
    assert any(n.startswith("cannopy.frontend/") for n in names)


def test_one_of_many_attributes_of_a_layer_is_named() -> None:
    def identity_with(plan: int) -> Any:
        model = tiny()
        for i in range(20):
            setattr(model.proj, f"number_{i}", i * 1000003)
        model.proj.plan = {"layers": [1, plan]}
        return identity(model, example())

    changed = key.differences(identity_with(2), identity_with(3))
    assert len(changed) == 1
    assert changed[0].startswith("attributes (self.proj.plan: ")


def test_what_differs_in_long_values_is_told_by_digests() -> None:
    def identity_with(**plan: int) -> Any:
        model = tiny()
        model.plan = {"layers": [list(range(20)), plan]}
        return identity(model, example())

    changed = key.differences(identity_with(a=1), identity_with(a=2))
    assert len(changed) == 1
    assert changed[0].startswith("attributes (self.plan['layers']: ")
    old, new = changed[0].partition(": ")[2].rstrip(")").split(" -> ")
    assert all(text.startswith("list(list(0,1,2,") for text in (old, new))
    assert old != new
