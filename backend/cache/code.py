"""Digest of the code that a method runs, without running it.

From the method and the ``forward`` of every module in the tree, names are followed: globals of a function, and
methods of those names on the classes of the model and of the call's objects. Bytecode is digested, not text, so a
comment, a docstring or another line number changes nothing and a function put in place at run time is seen. torch,
torch_npu and the standard library stand for themselves by their versions. Work is done per class and function, not
per layer.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

from cannopy.backend.cache.environment import Environment, is_environment
from cannopy.backend.cache.functions import (
    function_text,
    functions_in,
    held_by,
    held_text,
    imported_in,
    names,
    parts_of,
)
from cannopy.backend.cache.functions import reference_text as reference_text
from cannopy.backend.cache.packages import (
    is_installed,
    is_own,
    is_stable,
    of_distributed,
    own_classes,
)
from cannopy.backend.cache.text import LOADING, constant_text, module_name, types_in

Described = Callable[[Any], tuple[str, Collection[Any]]]
"""Text of an object that is neither plain nor code, and the classes, functions and modules in it."""

_COLLECTIVES = frozenset({"_c10d_functional", "c10d", "c10d_functional", "_dtensor"})
"""Namespaces of ``torch.ops``."""
_OF_SHARDED_MODELS = ("transformers.distributed.", "transformers.loss.")
"""Names in these meet those of every stock model; inference of a model that is not sharded runs none of it."""
_LOADERS = ("transformers.modeling_utils.", "transformers.generation.", "transformers.distributed.")
_NOT_NOTED = frozenset({"__file__", "__cached__", "__path__", "__spec__", "__loader__", "__doc__", "__dict__"})
"""Globals of every module that say where it is, not what it does."""
_NEVER_CALLED = frozenset(
    {
        "__init__", "__new__", "__init_subclass__", "__set_name__", "__class_getitem__", "__subclasshook__", "__del__",
        "__repr__", "__str__", "__format__", "__dir__", "__sizeof__", "__annotate__", "__copy__", "__deepcopy__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__",
    }
)  # fmt: skip
"""Methods that Python calls by itself, but not for an operator or an access in code that a trace runs."""


class CodeWalk:
    """Collects what is reachable from some roots: digests of functions, values that they name.

    ``describe`` gives the text of an object that is neither plain nor code, and what code is in it.
    """

    def __init__(self, classes: Iterable[type], describe: Described) -> None:
        self._found: dict[str, set[str]] = {}
        self._classes: list[type] = []
        self._class_set: set[type] = set()
        self._modules: dict[str, types.ModuleType] = {}
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
        for cls in own_classes(classes):
            self._enter(cls)

    @property
    def items(self) -> dict[str, str]:
        """Name -> digest or value; a name that stands for several functions has all their digests."""
        found = {name: "+".join(sorted(texts)) for name, texts in self._found.items()}
        return dict(sorted({**found, **self.environment.items()}.items()))

    def add(self, root: Any) -> None:
        """Follow `root`: a function, a method, a class, a module, an object, or anything that wraps one."""
        self._meet(root)
        self._follow()

    def add_name(self, name: str) -> None:
        """Follow the attribute `name` of each class, and of each module that code holds."""
        self._name(name)
        self._follow()

    def add_patched(self, name: str, f: types.FunctionType) -> None:
        """Follow a function that was put in the place of torch's own ``name``."""
        self._found.setdefault(f"in place of {name}", set()).add(f"{module_name(f.__module__)}.{f.__qualname__}")
        self.add(f)

    def _follow(self) -> None:
        while self._queue:
            self._visit(self._queue.pop())

    def _name(self, name: str) -> None:
        if name in self._names_done:
            return
        self._names_done.add(name)
        for cls in list(self._classes):
            if name in vars(cls):
                self._member(cls, name)
        for module in list(self._modules.values()):
            self._in_module(module, name)

    def _member(self, cls: type, name: str) -> None:
        value, path = vars(cls)[name], f"{module_name(cls.__module__)}.{cls.__qualname__}.{name}"
        installed = is_installed(cls.__module__)
        self._push(value)
        self._note(path, value, installed)
        if installed:
            return
        self._meet(value)
        for part in parts_of(value):
            followed = isinstance(part, types.FunctionType) and not is_stable(part)
            if not (followed or name.startswith("__") or constant_text(part) is not None):
                self._found.setdefault(path, set()).add(held_text(part, installed, self._text))

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
                for f in itertools.chain.from_iterable(map(functions_in, members)):
                    if f.__module__ == name and id(f) not in self._seen:
                        self._record(f, lambda v: self._describe(v)[0])

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
        for f in functions_in(value):
            if not is_stable(f) and id(f) not in self._seen:
                self._seen.add(id(f))
                self._queue.append(f)

    def _meet(self, value: Any) -> None:
        """Something that code of the user's holds or names: what can be run of it is followed."""
        self._push(value)
        if isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            for cls in types_in(value):
                self._class(cls)

    def _text(self, value: Any) -> str:
        text, inside = self._describe(value)
        for v in inside:
            self._meet(v)
        return text

    def _record(self, f: types.FunctionType, describe: Callable[[Any], str]) -> None:
        name = f"{module_name(f.__module__)}.{f.__qualname__}"
        self._found.setdefault(name, set()).add(function_text(f, describe))
        if not f"{f.__module__}.".startswith(_LOADERS):
            installed = is_installed(f.__module__ or "", f.__code__.co_filename)
            self.loading |= LOADING.intersection(names(f.__code__, by_text=not installed))

    def _visit(self, f: types.FunctionType) -> None:
        self._record(f, self._text)
        installed = is_installed(f.__module__ or "", f.__code__.co_filename)
        held = held_by(f)
        for value in held:
            if installed:
                self._push(value)
            else:
                self._meet(value)
        for module in () if installed else imported_in(f):
            self._module(module)
        known = list(names(f.__code__, by_text=not installed))
        for n in known:
            if n.startswith("torch.distributed") or n in _COLLECTIVES:  # an import inside, torch.ops.…
                self._reaches_distributed(f)
            self._global(f, n, installed)
            self._name(n)
        if not installed:
            named = [f.__globals__[n] for n in known if n in f.__globals__]
            self.environment.code(f.__code__, [*named, *held])
            self.environment.note(held)

    def _reaches_distributed(self, f: types.FunctionType) -> None:
        if f"{f.__module__}.".startswith(_OF_SHARDED_MODELS):
            self.distributed_if_sharded = True
        else:
            self.distributed = True

    def _global(self, f: types.FunctionType, name: str, installed: bool) -> None:
        if name not in f.__globals__:
            return
        value = f.__globals__[name]
        whole_torch = value is sys.modules.get("torch")
        if of_distributed(value) or (whole_torch and "distributed" in names(f.__code__)):
            self._reaches_distributed(f)
        if isinstance(value, types.ModuleType):
            self._through(value, set(names(f.__code__, not installed)), installed, set())
        else:
            self._named(f"{module_name(f.__module__)}.{name}", value, installed)

    def _through(self, module: types.ModuleType, known: set[str], installed: bool, seen: set[int]) -> None:
        """What ``module.name`` and ``module.below.name`` may be in code with the names ``known``."""
        if id(module) in seen:
            return
        seen.add(id(module))
        if not installed and is_own(module):
            self._module(module)
            return
        stable = is_stable(module)
        for n in known.intersection(vars(module)):
            value = vars(module)[n]
            if isinstance(value, types.ModuleType):
                self._through(value, known, installed, seen)
            elif not stable:
                self._named(f"{module_name(module.__name__)}.{n}", value, installed)
            elif isinstance(value, types.FunctionType) and not is_stable(value):
                self._named(f"{module.__name__}.{n}", value, installed)

    def _named(self, name: str, value: Any, installed: bool) -> None:
        """Something that code reads by name from a module: code is followed, a value noted."""
        self._push(value)
        self._class(value)
        self._note(name, value, installed)
        if installed:
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            for v in held:
                self._push(v)
        elif not is_environment(value):
            self._meet(value)
            if constant_text(value) is None:
                self._found.setdefault(name, set()).add(held_text(value, installed, self._text))

    def _module(self, module: types.ModuleType) -> None:
        """A module of the user's that code holds: what has one of the names in code counts."""
        if module.__name__ in self._modules or not is_own(module):
            return
        self._modules[module.__name__] = module
        for n in ["__getattr__", *sorted(self._names_done)]:
            self._in_module(module, n)

    def _in_module(self, module: types.ModuleType, name: str) -> None:
        if name in vars(module):
            self._named(f"{module_name(module.__name__)}.{name}", vars(module)[name], False)

    def _class(self, value: Any) -> None:
        """A class that code names may be instantiated: its methods count like those of the model's classes."""
        if not isinstance(value, type) or value in self._class_set or is_stable(value):
            return
        for cls in own_classes([value]):
            if cls not in self._class_set:
                self._enter(cls)
                for n in ("__init__", "__new__"):
                    if n in vars(cls):
                        self._member(cls, n)

    def _enter(self, cls: type) -> None:
        """Take a class in: what has a name that code uses, and what operators and calls run."""
        self._class_set.add(cls)
        self._classes.append(cls)
        self._class(type(cls))
        for n, value in list(vars(cls).items()):
            operator = n.startswith("__") and n.endswith("__") and n not in _NEVER_CALLED
            if n == "forward" or n in self._names_done or (operator and any(True for _ in functions_in(value))):
                self._member(cls, n)
