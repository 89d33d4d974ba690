"""Functions as text, and what stands in them: names, values that they hold, modules that they import."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cannopy.backend.cache.packages import is_installed, is_own
from cannopy.backend.cache.text import code_text, constant_text, digest, module_name

Describe = Callable[[Any], str]

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_METHODS_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_IMPORT = dis.opmap["IMPORT_NAME"]
_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller"})
_SPARE = frozenset({"__wrapped__", "__doc__", "__module__", "__name__", "__qualname__"})


def names(code: types.CodeType, by_text: bool = False) -> Iterator[str]:
    """The names in a code object and in those inside it; ``by_text``: also those that ``getattr`` is given as text."""
    yield from code.co_names
    if by_text and not _BY_TEXT.isdisjoint(code.co_names):
        yield from (s for s in code.co_consts if isinstance(s, str) and s.isidentifier())
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from names(c, by_text)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Plain functions behind methods, properties, partials and decorators."""
    for _ in range(16):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                if part is not None:
                    yield from functions_in(part)
            return
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            for part in (*value.args, *value.keywords.values()):
                yield from functions_in(part)
            value = value.func
        elif isinstance(value, types.FunctionType):
            yield value
            if not hasattr(value, "__wrapped__"):
                return
            value = value.__wrapped__
        elif not isinstance(value, types.ModuleType) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        else:
            return


def parts_of(value: Any) -> list[Any]:
    """What stands behind a member of a class: the functions of a property, the one of a static or class method."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset) if part is not None]
    return [value.__func__] if isinstance(value, (staticmethod, classmethod)) else [value]


def is_bound(value: Any) -> bool:
    """Whether a method carries an object with it, not a class or a module."""
    if not isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        return False
    return not isinstance(value.__self__, (types.ModuleType, type, type(None)))


def reference_text(value: Any) -> str | None:
    """A function, class, module or operator by its name, a partial with its arguments; None for anything else."""
    if isinstance(value, types.ModuleType):
        return f"module {module_name(value.__name__)}"
    if isinstance(value, (functools.partial, functools.partialmethod)):
        parts = [*value.args, *itertools.chain(*sorted(value.keywords.items()))]
        return f"partial {[_short(v) for v in (value.func, *parts)]}"
    known = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)
    if not isinstance(value, (*known, *_OPERATORS, *_METHODS_IN_C)):
        return None
    kind = "class" if isinstance(value, type) else "function"
    code = f" {digest(code_text(value.__code__))}" if isinstance(value, types.FunctionType) else ""
    module = module_name(getattr(value, "__module__", None) or "")
    return f"{kind} {module}.{getattr(value, '__qualname__', value)}{code}"


def _short(value: Any) -> str:
    return constant_text(value) or reference_text(value) or type(value).__qualname__


def held_by(f: types.FunctionType) -> list[Any]:
    """What a function has with it: its closure, defaults and attributes."""
    found: list[Any] = []
    for cell in f.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    own = (v for k, v in vars(f).items() if k not in _SPARE)
    return [*found, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values(), *own]


def function_text(f: types.FunctionType, describe: Describe) -> str:
    """Digest of code, closure, defaults, keyword defaults and attributes of a function."""
    installed = is_installed(f.__module__ or "", f.__code__.co_filename)
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(held_text(cell.cell_contents, installed, describe))
        except ValueError:  # not filled yet
            cells.append("empty")
    defaults = [held_text(v, installed, describe) for v in f.__defaults__ or ()]
    keywords = [f"{k}={held_text(v, installed, describe)}" for k, v in sorted((f.__kwdefaults__ or {}).items())]
    own = [] if installed else [(k, v) for k, v in sorted(vars(f).items()) if k not in _SPARE]
    own_text = "".join(f"{k}={held_text(v, installed, describe)}" for k, v in own)
    return digest(f"{code_text(f.__code__)}{cells}{defaults}{keywords}{own_text}")


def held_text(value: Any, installed: bool, describe: Describe) -> str:
    """A value that code holds. Objects of installed code are told by type: they are as their version makes them."""
    text = constant_text(value)
    carries = isinstance(value, (functools.partial, functools.partialmethod)) or is_bound(value)
    if text is None and (installed or not carries):
        text = reference_text(value)
    if text is not None:
        return text
    return type(value).__qualname__ if installed else describe(value)


def imported_in(f: types.FunctionType) -> Iterator[types.ModuleType]:
    """The user's own modules that a function imports when it runs."""
    package = f.__globals__.get("__package__") or ""
    for code in _codes(f.__code__):
        if _IMPORT not in code.co_code[::2]:
            continue
        done = list(dis.get_instructions(code))
        for i, step in enumerate(done):
            if step.opcode == _IMPORT and i > 1:
                level, inside = done[i - 2].argval or 0, done[i - 1].argval or ()
                with contextlib.suppress(ImportError, ValueError):
                    yield from _modules(importlib.util.resolve_name("." * level + step.argval, package), inside)


def _modules(name: str, inside: tuple[str, ...]) -> Iterator[types.ModuleType]:
    """The module, those around it, and those of the names ``inside`` that are modules."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        module = _own_module(".".join(parts[:i]))
        if module is None:
            return
        yield module
    for n in inside:
        if module is not None and not hasattr(module, n) and hasattr(module, "__path__"):
            below = _own_module(f"{name}.{n}")
            if below is not None:
                yield below


def _own_module(name: str) -> types.ModuleType | None:
    """A module of the user's, imported if need be, as running the code would do; None for any other."""
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.find_spec(name)
        if spec is None or is_installed("", spec.origin or "") or spec.origin in ("built-in", "frozen"):
            return None
        try:
            module = importlib.import_module(name)
        except Exception:  # noqa: BLE001 whatever the user's file raises: a capture says it better
            return None
    return module if is_own(module) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _codes(c)
