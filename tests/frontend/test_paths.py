"""Access paths: parsed without evaluation, printed back, followed with clear errors."""

from __future__ import annotations

import keyword
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cannopy.frontend import bindings, paths
from cannopy.frontend.errors import BindingError

_KEYWORDS = set(keyword.kwlist)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True).filter(lambda n: n not in _KEYWORDS)
steps = st.one_of(
    st.builds(paths.Attr, names), st.builds(paths.Key, st.one_of(st.integers(-99, 99), st.text(max_size=6)))
)


@given(st.sampled_from(["self", "args", "kwargs"]), st.lists(steps, max_size=5))
def test_text_and_path_are_one(root: paths.Root, chain: list[paths.Step]) -> None:
    path = paths.Path(root, tuple(chain))
    assert paths.parse(str(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        "self.f()",
        "other.x",
        "self.x[y]",
        "self.x[1:2]",
        "self.x[1.5]",
        "self.x[True]",
        "self + self",
        "self.",
        "",
        "self.x[(1, 2)]",
        "__import__('os').name",
    ],
)
def test_anything_else_is_no_path(text: str) -> None:
    with pytest.raises(ValueError, match="access path"):
        paths.parse(text)


def test_paths_are_followed() -> None:
    cache = SimpleNamespace(layers=[SimpleNamespace(keys="k0"), SimpleNamespace(keys="k1")])
    self = SimpleNamespace(d={"a,\"b']": "odd"}, cache=cache)
    call = (self, ("first", ["x", "y"]), {"cache": cache})
    assert bindings.resolve("kwargs['cache'].layers[1].keys", *call) == "k1"
    assert bindings.resolve("args[1][-1]", *call) == "y"
    assert bindings.resolve(str(paths.Path("self", (paths.Attr("d"), paths.Key("a,\"b']")))), *call) == "odd"
    assert bindings.resolve("self", *call) is self


@pytest.mark.parametrize(
    ("path", "at", "step"),
    [
        ("args[3]", "args (tuple)", "[3]"),
        ("kwargs['cache'].layers[0]", "kwargs (dict)", "['cache']"),
        ("self.a.b.c", "self.a (SimpleNamespace)", ".b"),
        ("self.n[0]", "self.n (int)", "[0]"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_step(path: str, at: str, step: str) -> None:
    with pytest.raises(BindingError) as caught:
        bindings.resolve(path, SimpleNamespace(a=SimpleNamespace(), n=3), (1,), {})
    assert f"{path} cannot be reached: {at} has no {step}" in str(caught.value)
