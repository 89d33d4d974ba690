"""Access paths: syntax, lookup, errors."""

from types import SimpleNamespace as Ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cannopy.fx_passes.paths import PathLookupError, PathSyntaxError, compile_path, parse_path

OBJ = Ns(layers=[Ns(keys="K0"), Ns(keys="K1")], table={"a'b": 1, 'q"': 2, "中文": 3, "a]b\\": 4, 5: 6, True: 7})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kwargs['cache'].layers[1].keys", "K1"),
        ("args[0].layers[-1].keys", "K1"),
        ("self.layers[0].keys", "K0"),
        ('self.table["a\'b"]', 1),
        ("self.table['a\\'b']", 1),
        ("self.table['q\"']", 2),
        ("self.table['中文']", 3),
        ("self.table['a]b\\\\']", 4),
        ("self.table[5]", 6),
        ("self.table[True]", 7),
        ("self", OBJ),
    ],
)
def test_resolves(path: str, value: object) -> None:
    assert compile_path(path)(OBJ, (OBJ,), {"cache": OBJ}) == value


@pytest.mark.parametrize(
    "path",
    ["", "L['self']", "cache.layers", "self.", "self.1a", "self[a]", "self.f()", "self[0", "self['x'", "self. a",
     "self[0]+1", "selfx.y", "self[1:2]", "self['a' 'b']"],
)  # fmt: skip
def test_refuses_other_text(path: str) -> None:
    with pytest.raises(PathSyntaxError):
        parse_path(path)


def test_no_code_runs() -> None:
    with pytest.raises(PathSyntaxError):
        parse_path("self[__import__('os').getpid()]")


@pytest.mark.parametrize(
    ("path", "step", "where"),
    [
        ("kwargs['cache'].layers[9].keys", "[9]", "kwargs['cache'].layers (list)"),
        ("kwargs['other'].layers", "['other']", "kwargs (dict)"),
        ("self.layers[0].values", ".values", "self.layers[0] (SimpleNamespace)"),
        ("args[0].layers.keys['x']", ".keys", "args[0].layers (list)"),
    ],
)
def test_lookup_error_names_the_step(path: str, step: str, where: str) -> None:
    with pytest.raises(PathLookupError) as e:
        compile_path(path)(OBJ, (OBJ,), {"cache": OBJ})
    assert (e.value.step, e.value.found) == (step, where)
    assert path in str(e.value)


@given(st.lists(st.one_of(st.text(), st.integers(), st.booleans(), st.none()), max_size=4))
def test_any_key_survives_a_round_trip(keys: list[object]) -> None:
    text = "args" + "".join(f"[{k!r}]" for k in keys)
    parsed = parse_path(text)
    assert [s.key for s in parsed.steps] == keys
    assert parse_path(str(parsed)) == parsed
