"""What a model's code reaches in another file counts, by whatever way it gets there."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backend.changing import identity

X = torch.linspace(-1, 2, 16).view(2, 8)
FN = "def h(x): return x * 2.0\ndef fn(x): return h(x)\n"
CALLED = "class A:\n    def __call__(self, x): return x * 2.0\n"
HEAD = "import collections, decimal, enum, functools, operator, types\nimport torch\nfrom torch import nn\n"
HEAD += "from torch.nn import functional as F\n"
OTHER = "import away\n"

# the model's forward, what stands before it, the other file; there 2.0 becomes 3.0
CODE: dict[str, tuple[str, str, str]] = {
    "submodule": ("away.below.fn(x)", "import away.below\n", FN),
    "import inside": ("self.late(x)", "", FN),
    "module in a table": ("T['a'].fn(x)", OTHER + "T = {'a': away}\n", FN),
    "object in a table": ("T['a'](x)", OTHER + "T = {'a': away.A()}\n", CALLED),
    "object in a closure": ("G(x)", OTHER + "def mk(a): return lambda x: a(x)\nG = mk(away.A())\n", CALLED),
    "object by default": ("fn(x)", OTHER + "def fn(x, *, a=away.A()): return a(x)\n", CALLED),
    "function two tables down": ("T['a'][0](x)", OTHER + "T = {'a': (away.fn,)}\n", FN),
    "class in a table": ("T['a'].f(x)", OTHER + "T = {'a': away.A}\n",
                         "class A:\n    @staticmethod\n    def f(x): return x * 2.0\n"),
    "bound method": ("P(x)", OTHER + "P = away.A(2).f\n",
                     "class A:\n    def __init__(self, k): self.k = 2.0\n    def f(self, x): return x * self.k\n"),
    "object in a partial": ("P(x)", OTHER + "P = functools.partial(away.f, away.S)\n",
                            "S = types.SimpleNamespace(k=2.0)\ndef f(s, x): return x * s.k\n"),
    "name as text": ("getattr(away, 'fn')(x)", OTHER, FN),
    "operator": ("away.make() * x", OTHER,
                 "class A:\n    def __mul__(self, x): return x * 2.0\ndef make(): return A()\n"),
    "item": ("away.C[0] * x", OTHER, "class A:\n    def __getitem__(self, i): return 2.0\nC = A()\n"),
    "any attribute": ("away.C.some * x", OTHER, "class A:\n    def __getattr__(self, n): return 2.0\nC = A()\n"),
    "attribute of a module": ("away.some * x", OTHER, "def __getattr__(n): return 2.0\n"),
    "class in a class": ("away.A.B.k * x", OTHER, "class A:\n    class B:\n        k = 2.0\n"),
    "enum": ("away.E.A.value * x", OTHER, "class E(enum.Enum):\n    A = 2.0\n"),
    "attribute of a function": ("away.fn(x)", OTHER, "def fn(x): return x * fn.k\nfn.k = 2.0\n"),
    "single dispatch": ("away.fn(1.0, x)", OTHER, "def h(x): return x * 2.0\n@functools.singledispatch\n"
                        "def fn(a, x): return x\n@fn.register\ndef _(a: float, x): return h(x)\n"),
    "decorator that is an object": ("fn(x)", OTHER + "@away.D\ndef fn(x): return x\n",
                                    "class D:\n    def __init__(self, f): functools.update_wrapper(self, f)\n"
                                    "    def __call__(self, x): return self.__wrapped__(x) * 2.0\n"),
    "torch's function replaced": ("F.softsign(x)", OTHER, "def mine(x): return x * 2.0\nF.softsign = mine\n"),
    "and called by torch": ("nn.Softsign()(x)", OTHER, "def mine(x): return x * 2.0\nF.softsign = mine\n"),
    "torch's method replaced": ("nn.Softsign()(x) + x.mine()", OTHER,
                                "torch.Tensor.mine = lambda x: x * 2.0\n"),
}  # fmt: skip
# what an attribute of the model is, before and after; how it is used
VALUES: dict[str, tuple[str, str, str]] = {
    "order of a table": ("{'m': 2.0, 'a': 1.0}", "{'a': 1.0, 'm': 2.0}", "(x * V['m'] + list(V.values())[0])"),
    "keys": ("{nn.Linear: 2.0, nn.GELU: 3.0}", "{nn.Linear: 3.0, nn.GELU: 2.0}", "x * V[nn.Linear]"),
    "set of classes": ("{nn.Linear}", "{nn.GELU}", "x * (nn.GELU in V)"),
    "decimal": ("decimal.Decimal('2')", "decimal.Decimal('3')", "x * float(V)"),
    "getter": ("operator.itemgetter(0)", "operator.itemgetter(1)", "x * V((1.0, 2.0))"),
    "caller": ("operator.methodcaller('relu')", "operator.methodcaller('tanh')", "V(x)"),
    "method in C": ("torch.Tensor.relu", "torch.Tensor.tanh", "V(x)"),
    "bound in C": ("{'a': 2.0}.get", "{'a': 3.0}.get", "x * V('a')"),
    "bytes": ("bytearray([2])", "bytearray([3])", "x * V[0]"),
    "fields": ("collections.namedtuple('C', 'a b')(1, 2)", "collections.namedtuple('C', 'b a')(1, 2)", "x * V.a"),
    "derived from a table": ("type('C', (dict,), {})()", "type('C', (dict,), {'a': 1})()", "x * hasattr(V, 'a')"),
    "far down": ("[[[[[[[[[[[[[[2.0]]]]]]]]]]]]]]", "[[[[[[[[[[[[[[3.0]]]]]]]]]]]]]]", "x * V" + "[0]" * 14),
}
MODEL = "class Model(nn.Module):\n    {init}\n    def forward(self, x): return {body}\n"
LATE = "    def late(self, x):\n        from away import fn\n        return fn(x)\n"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], nn.Module]]:
    """The model of two files, ``away`` and its submodule ``below`` being the second."""
    count = itertools.count()

    def write(main: str, away: str) -> nn.Module:
        for name in ("reaching", "away", "away.below"):
            sys.modules.pop(name, None)
        folder = tmp_path / str(next(count))
        (folder / "away").mkdir(parents=True)
        (folder / "reaching.py").write_text(HEAD + main)
        (folder / "away" / "__init__.py").write_text(HEAD + away)
        (folder / "away" / "below.py").write_text(HEAD + away)
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        model: nn.Module = importlib.import_module("reaching").Model()
        return model.eval()

    monkeypatch.setattr(nn.functional, "softsign", nn.functional.softsign)
    monkeypatch.setattr(torch.Tensor, "mine", None, raising=False)
    yield write
    for name in ("reaching", "away", "away.below"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", CODE)
def test_code_elsewhere_counts(make: Callable[[str, str], nn.Module], name: str) -> None:
    body, before, away = CODE[name]
    main = before + MODEL.format(init="pass", body=body) + LATE
    old = make(main, away)
    key, result = identity(old, args=(X,)).key, old(X)
    assert identity(old, args=(X,)).key == key
    assert identity(make(main, "# a comment\n" + away), args=(X,)).key == key
    new = make(main, away.replace("2.0", "3.0"))
    assert not torch.equal(new(X), result)
    assert identity(new, args=(X,)).key != key


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_not_plain_count(make: Callable[[str, str], nn.Module], name: str) -> None:
    before, after, use = VALUES[name]
    init = "def __init__(self):\n        super().__init__()\n        self.value = away.V"
    main = OTHER + MODEL.format(init=init, body=use.replace("V", "self.value"))
    old, again, new = (make(main, f"V = {text}\n") for text in (before, before, after))
    assert not torch.equal(old(X), new(X))
    assert identity(old, args=(X,)).key == identity(again, args=(X,)).key
    assert identity(old, args=(X,)).key != identity(new, args=(X,)).key


@pytest.mark.parametrize("everywhere", [False, True], ids=["of one module", "of all modules"])
def test_an_object_as_hook_counts(make: Callable[[str, str], nn.Module], everywhere: bool) -> None:
    away = "class H:\n    def __init__(self): self.k = 1\n    def __call__(self, m, a, o): return o * 2.0\n"
    main = OTHER + MODEL.format(init="pass", body="x")
    keys = []
    for text in (away, away, away.replace("2.0", "3.0"), away.replace("k = 1", "k = 2")):
        model = make(main, text)
        hook = sys.modules["away"].H()
        register = nn.modules.module.register_module_forward_hook if everywhere else model.register_forward_hook
        handle = register(hook)
        keys.append(identity(model, args=(X,)).key)
        handle.remove()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_method_that_another_library_adds_counts_only_where_it_is_named(
    make: Callable[[str, str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(transformers adds ``smart_apply`` to nn.Module when it initialises its first model of a process.)"""
    plain, naming = (MODEL.format(init="pass", body=body) for body in ("x * 2", "self.added(x)"))
    keys = []
    for factor in (2.0, 3.0):
        for main in (plain, naming):
            monkeypatch.setattr(nn.Module, "added", eval(f"lambda self, x: x * {factor}"), raising=False)
            keys.append(identity(make(main, ""), args=(X,)).key)
    monkeypatch.delattr(nn.Module, "added")
    assert identity(make(plain, ""), args=(X,)).key == keys[0] == keys[2]
    assert keys[1] != keys[3]
    monkeypatch.setattr(nn.Module, "extra_repr", lambda self: "torch has this one")
    assert identity(make(plain, ""), args=(X,)).key != keys[0]
