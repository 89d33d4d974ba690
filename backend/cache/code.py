"""Digest of the code that a method runs, without running it.

From the method and the ``forward`` of every module in the tree, names are followed: globals of a function, and
methods of those names on the classes of the model and of the call's objects. Bytecode is digested, not text, so a
comment or another line number changes nothing and a function put in place at run time is seen. torch, torch_npu and
the standard library stand for themselves by their versions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

STABLE = frozenset({"torch", "torch_npu", "torchair", "numpy", "builtins", "cannopy"}) | sys.stdlib_module_names
"""Top-level packages that the ``versions`` and ``cannopy`` fields of the key cover."""

_COLLECTIVES = frozenset({"_c10d_functional", "c10d", "c10d_functional", "_dtensor"})
"""Namespaces of ``torch.ops``."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def digest(text: str) -> str:
    """16 hex digits of SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def constant_text(value: Any) -> str | None:
    """A scalar, or a tuple, list or set of scalars, as text that is the same in every process; None for the rest."""
    if isinstance(value, _SCALARS):
        text = repr(value)
    elif isinstance(value, (tuple, list, set, frozenset)):
        parts = [constant_text(v) for v in value]
        if any(p is None for p in parts):
            return None
        known = [p for p in parts if p is not None]
        text = f"{type(value).__name__}({','.join(sorted(known) if isinstance(value, (set, frozenset)) else known)})"
    else:
        return None
    return text if len(text) <= 80 else f"{text[:40]}… {digest(text)}"


def top_package(obj: Any) -> str:
    """First part of the name of the module that defines a class or a function."""
    return str(getattr(obj, "__module__", None) or "builtins").split(".")[0]


def of_distributed(value: Any) -> bool:
    """Whether a module, class, function or object is of torch.distributed."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and (name.startswith("torch.distributed") or name == "torch._C._distributed_c10d")


def own_classes(classes: Iterable[type]) -> list[type]:
    """The classes and their bases that are not of a `STABLE` package, each once."""
    seen: dict[type, None] = {}
    for cls in classes:
        for base in cls.__mro__:
            if top_package(base) not in STABLE:
                seen.setdefault(base)
    return list(seen)


def code_text(code: types.CodeType) -> str:
    """What a code object does: instructions, names and constants; no file name, no line numbers."""
    constants = []
    for c in code.co_consts:
        constants.append(code_text(c) if isinstance(c, types.CodeType) else constant_text(c) or type(c).__name__)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
    return f"{names}{code.co_code.hex()}[{','.join(constants)}]"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _names(c)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Plain functions behind methods, properties, partials and decorators."""
    for _ in range(16):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                if part is not None:
                    yield from _functions(part)
            return
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            for part in (*value.args, *value.keywords.values()):
                yield from _functions(part)
            value = value.func
        elif isinstance(value, types.FunctionType):
            yield value
            if not hasattr(value, "__wrapped__"):
                return
            value = value.__wrapped__
        elif hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            return


class CodeWalk:
    """Collects what is reachable from some roots: digests of functions, values of constants they name."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._found: dict[str, set[str]] = {}
        self._classes = own_classes(classes)
        self._seen: set[int] = set()
        self._queue: list[types.FunctionType] = []
        self._names_done: set[str] = set()
        self.distributed = False
        """Whether code that was followed can reach torch.distributed: what it computes may then depend on the rank."""

    @property
    def items(self) -> dict[str, str]:
        """Name -> digest or value; a name that stands for several functions has all their digests."""
        return {name: "+".join(sorted(texts)) for name, texts in sorted(self._found.items())}

    def add(self, root: Any) -> None:
        """Follow `root`: a function, a method, a class (its ``forward``) or anything that wraps one."""
        self._push(root)
        while self._queue:
            self._visit(self._queue.pop())

    def add_name(self, name: str) -> None:
        """Follow the attribute `name` of each class."""
        if name in self._names_done:
            return
        self._names_done.add(name)
        for cls in self._classes:
            if name in vars(cls):
                value = vars(cls)[name]
                self._push(value)
                self._note(f"{cls.__module__}.{cls.__qualname__}.{name}", value)

    def _note(self, name: str, value: Any) -> None:
        text = constant_text(value)
        if text is not None:
            self._found.setdefault(name, set()).add(text)

    def _push(self, value: Any) -> None:
        for f in _functions(value):
            if top_package(f) not in STABLE and id(f) not in self._seen:
                self._seen.add(id(f))
                self._queue.append(f)

    def _visit(self, f: types.FunctionType) -> None:
        name = f"{f.__module__}.{f.__qualname__}"
        cells = []
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            cells.append(constant_text(value) or type(value).__qualname__)
            self._push(value)
        defaults = [constant_text(v) or type(v).__qualname__ for v in f.__defaults__ or ()]
        keywords = [f"{k}={constant_text(v)}" for k, v in sorted((f.__kwdefaults__ or {}).items())]
        self._found.setdefault(name, set()).add(digest(f"{code_text(f.__code__)}{cells}{defaults}{keywords}"))
        for n in _names(f.__code__):
            self.distributed |= n.startswith("torch.distributed") or n in _COLLECTIVES  # an import inside, torch.ops.…
            self._global(f, n)
            self.add_name(n)

    def _global(self, f: types.FunctionType, name: str) -> None:
        if name not in f.__globals__:
            return
        value = f.__globals__[name]
        whole_torch = value is sys.modules.get("torch")
        self.distributed |= of_distributed(value) or (whole_torch and "distributed" in _names(f.__code__))
        self._note(f"{f.__module__}.{name}", value)
        if isinstance(value, types.ModuleType):
            if value.__name__.split(".")[0] in STABLE:
                return
            for n in _names(f.__code__):
                member = vars(value).get(n)
                self._push(member)
                self._class(member)
                if n in vars(value):
                    self._note(f"{value.__name__}.{n}", member)
        elif isinstance(value, (dict, list)):
            for v in value.values() if isinstance(value, dict) else value:
                self._push(v)
        else:
            self._push(value)
            self._class(value)

    def _class(self, value: Any) -> None:
        """A class that code names may be instantiated: its methods count like those of the model's classes."""
        if not inspect.isclass(value) or value in self._classes or top_package(value) in STABLE:
            return
        fresh = [c for c in own_classes([value]) if c not in self._classes]
        self._classes += fresh
        for cls in fresh:
            for n in ("__init__", "__new__", "__call__", "forward", *self._names_done):
                if n in vars(cls):
                    self._push(vars(cls)[n])


def file_digest(cls: type) -> str:
    """Digest of the source file that defines `cls`; "" when there is none (a notebook, ``exec``)."""
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if path is None:
        return ""
    try:
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).hexdigest()[:16]
    except OSError:
        return ""
