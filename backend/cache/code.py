"""Digest of the code that a method runs, without running it.

From the method and the ``forward`` of every module in the tree, names are followed: globals of a function, and
methods of those names on the classes of the model and of the call's objects. Bytecode is digested, not text, so a
comment, a docstring or another line number changes nothing and a function put in place at run time is seen. torch,
torch_npu and the standard library stand for themselves by their versions. Work is done per class and function, not
per layer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cannopy.backend.cache.environment import Environment, is_environment
from cannopy.backend.cache.text import LOADING, code_text, constant_text, digest, module_name

Describe = Callable[[Any], str]

STABLE = frozenset({"torch", "torch_npu", "torchair", "numpy", "builtins", "cannopy"}) | sys.stdlib_module_names
"""Top-level packages that the ``versions`` and ``cannopy`` fields of the key cover."""

_COLLECTIVES = frozenset({"_c10d_functional", "c10d", "c10d_functional", "_dtensor"})
"""Namespaces of ``torch.ops``."""
_OF_SHARDED_MODELS = ("transformers.distributed.", "transformers.loss.")
"""Names in these meet those of every stock model; inference of a model that is not sharded runs none of it."""
_LOADERS = ("transformers.modeling_utils.", "transformers.generation.", "transformers.distributed.")
_NOT_NOTED = frozenset({"__file__", "__cached__", "__path__", "__spec__", "__loader__", "__doc__", "__dict__"})
"""Globals of every module that say where it is, not what it does."""
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_INSTALLED = ("site-packages", "dist-packages")


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


def is_installed(module: str, file: str = "") -> bool:
    """Whether a module is of an installed distribution, not a file of the user's."""
    file = getattr(sys.modules.get(module), "__file__", None) or file
    return any(part in file for part in _INSTALLED)


def reference_text(value: Any) -> str | None:
    """A function, class, module or operator by its name, a partial with its arguments; None for anything else."""
    if isinstance(value, types.ModuleType):
        return f"module {module_name(value.__name__)}"
    if isinstance(value, (functools.partial, functools.partialmethod)):
        parts = [*value.args, *itertools.chain(*sorted(value.keywords.items()))]
        return f"partial {[_short(v) for v in (value.func, *parts)]}"
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, *_OPERATORS)):
        return None
    kind = "class" if isinstance(value, type) else "function"
    code = f" {digest(code_text(value.__code__))}" if isinstance(value, types.FunctionType) else ""
    return f"{kind} {module_name(value.__module__ or '')}.{getattr(value, '__qualname__', value)}{code}"


def _short(value: Any) -> str:
    return constant_text(value) or reference_text(value) or type(value).__qualname__


def function_text(f: types.FunctionType, describe: Describe) -> str:
    """Digest of code, closure, defaults and keyword defaults of a function."""
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(_held(f, cell.cell_contents, describe))
        except ValueError:  # not filled yet
            cells.append("empty")
    defaults = [_held(f, v, describe) for v in f.__defaults__ or ()]
    keywords = [f"{k}={_held(f, v, describe)}" for k, v in sorted((f.__kwdefaults__ or {}).items())]
    return digest(f"{code_text(f.__code__)}{cells}{defaults}{keywords}")


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 an empty one raises
    except ValueError:
        return False
    return True


def _held(f: types.FunctionType, value: Any, describe: Describe) -> str:
    """A value that `f` holds. Objects of installed code are told by type: they are as their version makes them."""
    text = constant_text(value) or reference_text(value)
    if text is not None:
        return text
    if is_installed(f.__module__ or "", f.__code__.co_filename):
        return type(value).__qualname__
    return describe(value)


class CodeWalk:
    """Collects what is reachable from some roots: digests of functions, values that they name.

    ``describe`` gives the text of an object that is neither plain nor code.
    """

    def __init__(self, classes: Iterable[type], describe: Describe) -> None:
        self._found: dict[str, set[str]] = {}
        self._classes = own_classes(classes)
        self._class_set = set(self._classes)
        self._describe = describe
        self._seen: set[int] = set()
        self._queue: list[types.FunctionType] = []
        self._names_done: set[str] = set()
        self.environment = Environment()
        self.loading: set[str] = set()
        """The names of `LOADING` that code uses which neither loads nor generates."""
        self.distributed = False
        """Whether code that was followed can reach torch.distributed: what it computes may then depend on the rank."""
        self.distributed_if_sharded = False
        """The same through code that does so only in a sharded model, which has hooks or other objects then."""

    @property
    def items(self) -> dict[str, str]:
        """Name -> digest or value; a name that stands for several functions has all their digests."""
        found = {name: "+".join(sorted(texts)) for name, texts in self._found.items()}
        return dict(sorted({**found, **self.environment.items()}.items()))

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
        for cls in list(self._classes):
            if name in vars(cls):
                self._member(cls, name)

    def _member(self, cls: type, name: str) -> None:
        value, path = vars(cls)[name], f"{module_name(cls.__module__)}.{cls.__qualname__}.{name}"
        installed = is_installed(cls.__module__)
        self._push(value)
        self._note(path, value, installed)
        plain = constant_text(value) is not None or reference_text(value) is not None
        if not (installed or plain or name.startswith("__") or any(True for _ in _functions(value))):
            self._class(type(value))
            self._found.setdefault(path, set()).add(self._describe(value))

    def reads(self, name: str) -> bool:
        """Whether code that was followed uses the name."""
        return name in self._names_done

    def add_modules(self, classes: Iterable[type]) -> None:
        """All functions of the modules that define ``classes``, not followed further.

        Names that code puts together at run time (``getattr(self, "attend_" + kind)``) are found here.
        """
        for name in sorted({c.__module__ for c in classes} - {"__main__"}):
            module = sys.modules.get(name)
            for value in list(vars(module).values()) if module is not None else ():
                own = isinstance(value, type) and value.__module__ == name
                members = list(vars(value).values()) if own else [value]
                for f in itertools.chain.from_iterable(map(_functions, members)):
                    if f.__module__ == name and id(f) not in self._seen:
                        self._record(f)

    def _note(self, name: str, value: Any, installed: bool) -> None:
        """A plain value by name. Dicts of installed code are not noted: many are filled while a process runs."""
        if name.rpartition(".")[2] in _NOT_NOTED or (installed and isinstance(value, dict)):
            return
        text = constant_text(value)
        if not installed:
            self.environment.note(value)
        if text is not None:
            self._found.setdefault(name, set()).add(text)

    def _push(self, value: Any) -> None:
        for f in _functions(value):
            if top_package(f) not in STABLE and id(f) not in self._seen:
                self._seen.add(id(f))
                self._queue.append(f)

    def _record(self, f: types.FunctionType) -> None:
        name = f"{module_name(f.__module__)}.{f.__qualname__}"
        self._found.setdefault(name, set()).add(function_text(f, self._describe))
        if not f"{f.__module__}.".startswith(_LOADERS):
            self.loading |= LOADING.intersection(_names(f.__code__))

    def _visit(self, f: types.FunctionType) -> None:
        self._record(f)
        for cell in f.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                self._push(cell.cell_contents)
        names = list(_names(f.__code__))
        for n in names:
            if n.startswith("torch.distributed") or n in _COLLECTIVES:  # an import inside, torch.ops.…
                self._reaches_distributed(f)
            self._global(f, n)
            self.add_name(n)
        if not is_installed(f.__module__ or "", f.__code__.co_filename):
            held = [c.cell_contents for c in f.__closure__ or () if _is_filled(c)]
            named = [f.__globals__[n] for n in names if n in f.__globals__]
            defaults = [f.__defaults__, f.__kwdefaults__]
            self.environment.code(f.__code__, [*named, *held, *defaults])
            self.environment.note([*held, *defaults])

    def _reaches_distributed(self, f: types.FunctionType) -> None:
        if f"{f.__module__}.".startswith(_OF_SHARDED_MODELS):
            self.distributed_if_sharded = True
        else:
            self.distributed = True

    def _global(self, f: types.FunctionType, name: str) -> None:
        if name not in f.__globals__:
            return
        value = f.__globals__[name]
        whole_torch = value is sys.modules.get("torch")
        if of_distributed(value) or (whole_torch and "distributed" in _names(f.__code__)):
            self._reaches_distributed(f)
        if isinstance(value, types.ModuleType):
            if value.__name__.split(".")[0] in STABLE:
                return
            for n in _names(f.__code__):
                if n in vars(value):
                    self._named(f, f"{module_name(value.__name__)}.{n}", vars(value)[n])
        else:
            self._named(f, f"{module_name(f.__module__)}.{name}", value)

    def _named(self, f: types.FunctionType, name: str, value: Any) -> None:
        """Something that `f` reads by name from a module: code is followed, a value noted."""
        installed = is_installed(f.__module__ or "", f.__code__.co_filename)
        self._push(value)
        self._class(value)
        self._note(name, value, installed)
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for v in held:
            self._push(v)
        if not installed and constant_text(value) is None and not is_environment(value):
            self._class(type(value))
            self._found.setdefault(name, set()).add(_held(f, value, self._describe))

    def _class(self, value: Any) -> None:
        """A class that code names may be instantiated: its methods count like those of the model's classes."""
        if not isinstance(value, type) or value in self._class_set or top_package(value) in STABLE:
            return
        fresh = [c for c in own_classes([value]) if c not in self._class_set]
        self._classes += fresh
        self._class_set.update(fresh)
        for cls in fresh:
            for n in ("__init__", "__new__", "__call__", "forward", *self._names_done):
                if n in vars(cls):
                    self._member(cls, n)
