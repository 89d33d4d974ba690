"""Objects as text that is equal in every process when the objects are alike: no addresses, no order of sets.

Used for the plain attributes of modules and for the call's arguments. Tensors count by dtype, shape, stride and
device type, never by value: values are inputs of the graph.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from cannopy.backend.cache.code import of_distributed, reference_text, top_package
from cannopy.backend.cache.environment import strings
from cannopy.backend.cache.text import LOADING, VOLATILE, constant_text, digest, module_name, place

_MODULE_PLUMBING = frozenset(
    k
    for k in vars(torch.nn.Module())
    if k != "training"  # _parameters, _modules, hooks, …
)
_STATE = "logging threading _thread weakref io _io random queue asyncio multiprocessing concurrent socket subprocess"
_OPAQUE = frozenset(
    f"{_STATE} torch torch_npu builtins ctypes datetime time uuid tempfile contextlib contextvars".split()
)
"""Packages whose objects hold state of the process, not what a graph is made from."""
_DEPTH = 12


def class_name(cls: type) -> str:
    """Module and name of a class."""
    return f"{module_name(cls.__module__)}.{cls.__qualname__}"


def tensor_item(t: torch.Tensor) -> str:
    """``bfloat16[1, 96](96, 1) device``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{tuple(t.stride())} {place(t.device.type)}"


class Describer:
    """Walks objects once each; `classes` collects the classes met, `functions` the functions held as values.

    ``tree`` are the modules of the model, which are described one by one and not again where they are referred to.
    ``read`` are the names of `LOADING` that the code uses.
    """

    def __init__(self, tree: Iterable[torch.nn.Module] = (), read: Collection[str] = ()) -> None:
        self._tree = {id(m) for m in tree}
        self._unread = _MODULE_PLUMBING | VOLATILE | (LOADING - frozenset(read))
        self.classes: dict[type, None] = {}
        self.functions: list[Any] = []
        self.strings: set[str] = set()
        self._met: dict[int, str] = {}
        self._alive: list[Any] = []

    def items(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        """(path, text) of `value` and of everything reachable from it."""
        yield from self._walk(value, path, 0)

    def module_items(self, module: torch.nn.Module, path: str) -> Iterator[tuple[str, str]]:
        """(path, text) of the plain attributes of one module, its children left out."""
        self.classes.setdefault(type(module))
        yield f"{path} class", class_name(type(module))
        for name, value in sorted(vars(module).items()):
            if name not in self._unread:
                yield from self._walk(value, f"{path}.{name}", 1)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self.functions += hooks.values()
            if hooks:
                yield f"{path} hooks", "; ".join(reference_text(h) or class_name(type(h)) for h in hooks.values())

    def _walk(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        text = self._leaf(value)
        if text is not None:
            yield path, text
            return
        if id(value) in self._met:
            yield path, f"same as {self._met[id(value)]}"
            return
        self._met[id(value)] = path
        self._alive.append(value)
        if depth >= _DEPTH:
            yield path, f"{class_name(type(value))} (not looked into)"
            return
        yield from self._inside(value, path, depth)

    def _leaf(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            return tensor_item(value)
        if isinstance(value, type):
            self.classes.setdefault(value)
            return class_name(value)
        if isinstance(value, torch.nn.Module) and id(value) in self._tree:
            return f"module {class_name(type(value))}"
        if type(value) is dict:
            return None  # entry by entry, so that a miss names one
        self.strings.update(strings(value))
        return constant_text(value)

    def _inside(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        kind = type(value)
        if isinstance(value, Mapping):
            yield path, f"{kind.__qualname__} of {len(value)}"
            for k, v in sorted(value.items(), key=lambda kv: str(kv[0])):
                if k in VOLATILE:
                    continue
                yield from self._walk(v, f"{path}[{k!r}]" if constant_text(k) else f"{path}[?]", depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            yield path, f"{kind.__qualname__} of {len(value)}"
            for i, v in enumerate(value):
                yield from self._walk(v, f"{path}[{i}]", depth + 1)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            yield path, f"array {value.dtype}{list(value.shape)} {digest(value.tobytes().hex())}"
        elif callable(getattr(value, "to_dict", None)) and hasattr(value, "model_type"):
            known = dict(value.to_dict())
            known["_attn_implementation"] = getattr(value, "_attn_implementation", None)
            known["_experts_implementation"] = getattr(value, "_experts_implementation", None)
            yield from self._walk(known, path, depth + 1)
        elif of_distributed(value) and isinstance(value, torch.distributed.ProcessGroup):
            self.classes.setdefault(kind)
            yield path, f"group of ranks {torch.distributed.get_process_group_ranks(value)}"
        elif isinstance(value, functools.partial):
            self.functions.append(value)
            yield path, "partial"
            yield from self._walk([value.func, *value.args, dict(value.keywords)], f"{path} of", depth + 1)
        elif isinstance(value, types.MethodType):
            self.functions.append(value)
            yield path, reference_text(value) or ""
            yield from self._walk(value.__self__, f"{path}.__self__", depth + 1)
        elif reference_text(value) is not None or hasattr(value, "__code__") or (
            callable(value) and not hasattr(value, "__dict__")
        ):
            self.functions.append(value)
            yield path, reference_text(value) or f"function {class_name(kind)}"
        else:
            self.classes.setdefault(kind)
            yield path, class_name(kind)
            if not self._opaque(value):
                for name, v in sorted(self._attributes(value)):
                    if name not in VOLATILE:
                        yield from self._walk(v, f"{path}.{name}", depth + 1)

    @staticmethod
    def _opaque(value: Any) -> bool:
        """Whether an object is what its class says: locks, loggers, streams, generators of torch and of Python."""
        return not isinstance(value, torch.nn.Module) and top_package(type(value)) in _OPAQUE

    @staticmethod
    def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, getattr(value, name)
