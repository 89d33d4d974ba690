"""Objects as text that is equal in every process when the objects are alike: no addresses, no order of sets.

Used for the plain attributes of modules and for the call's arguments. Tensors count by dtype, shape, stride and
device type, never by value: values are inputs of the graph.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from cannopy.backend.cache.environment import strings
from cannopy.backend.cache.functions import is_bound, reference_text
from cannopy.backend.cache.packages import is_stable, of_distributed, top_package
from cannopy.backend.cache.text import LOADING, VOLATILE, constant_text, digest, module_name, place, types_in

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
_PROCESS = _OPAQUE - {"builtins"} | {"numpy", "torchair", "cannopy"}
_DEPTH = 24


def _sorted(value: Any) -> Any:
    """A config's entries by name: a file of it may have them in any order."""
    if isinstance(value, dict):
        return {k: _sorted(v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0]))}
    return [_sorted(v) for v in value] if isinstance(value, list) else value


def class_name(cls: type) -> str:
    """Module and name of a class."""
    return f"{module_name(cls.__module__)}.{cls.__qualname__}"


def tensor_item(t: torch.Tensor) -> str:
    """``bfloat16[1, 96](96, 1) device``; ``float32 sparse_coo device`` for a tensor without strides."""
    if t.is_nested or t.layout is not torch.strided:
        how = "nested" if t.is_nested else str(t.layout).removeprefix("torch.")
        return f"{str(t.dtype).removeprefix('torch.')} {how} {place(t.device.type)}"
    kind = "" if is_stable(type(t)) else f" {class_name(type(t))}"
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{tuple(t.stride())} {place(t.device.type)}{kind}"


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
            for i, hook in enumerate(hooks.values()):
                own = self._opaque(hook) and reference_text(hook) is None  # of torch: `WeightNorm`, …
                yield from self._walk(hook, f"{path} hooks[{i}]", 1)
                if own:
                    yield from self._walk(dict(vars(hook)), f"{path} hooks[{i}] of", 1)
        for named in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
            if getattr(module, named, None):
                yield f"{path} {named}", str(len(getattr(module, named)))

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
            if not is_stable(type(value)):
                self.classes.setdefault(type(value))
            return tensor_item(value)
        if isinstance(value, type):
            self.classes.setdefault(value)
            return class_name(value)
        if isinstance(value, torch.nn.Module) and id(value) in self._tree:
            return f"module {class_name(type(value))}"
        if type(value) is dict:
            return None  # entry by entry, so that a miss names one
        self.strings.update(strings(value))
        for cls in types_in(value):
            self.classes.setdefault(cls)
        return constant_text(value)

    def _inside(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        kind = type(value)
        if isinstance(value, Mapping):
            yield from self._mapping(value, path, depth)
        elif isinstance(value, (list, tuple, deque)):
            yield path, f"{kind.__qualname__} of {len(value)}"
            for i, v in enumerate(value):
                yield from self._walk(v, f"{path}[{i}]", depth + 1)
            yield from self._added(value, path, depth)
        elif isinstance(value, (set, frozenset)):
            parts = ["; ".join(f"{p}={t}" for p, t in self._walk(v, "", depth + 1)) for v in value]
            yield path, f"{kind.__qualname__} of {sorted(parts)}"
            yield from self._added(value, path, depth)
        elif kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "hasobject", False):
            yield path, f"array of objects {list(value.shape)}"
            yield from self._walk(value.tolist(), f"{path} of", depth + 1)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            yield path, f"array {value.dtype}{list(value.shape)} {digest(value.tobytes().hex())}"
        elif callable(getattr(value, "to_dict", None)) and hasattr(value, "model_type"):
            known = dict(value.to_dict())
            known["_attn_implementation"] = getattr(value, "_attn_implementation", None)
            known["_experts_implementation"] = getattr(value, "_experts_implementation", None)
            yield from self._walk(_sorted(known), path, depth + 1)
        elif of_distributed(value) and isinstance(value, torch.distributed.ProcessGroup):
            self.classes.setdefault(kind)
            yield path, f"group of ranks {torch.distributed.get_process_group_ranks(value)}"
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self.functions.append(value)
            yield path, "partial"
            yield from self._walk([value.func, *value.args, dict(value.keywords)], f"{path} of", depth + 1)
        elif isinstance(value, weakref.ref):
            yield from self._walk(value(), f"{path}()", depth + 1)
        elif is_bound(value):
            self.functions.append(value)
            yield path, reference_text(value) or ""
            yield from self._walk(value.__self__, f"{path}.__self__", depth + 1)
        elif reference_text(value) is not None or hasattr(value, "__code__") or (
            callable(value) and not hasattr(value, "__dict__")
        ):
            self.functions.append(value)
            yield path, reference_text(value) or f"function {class_name(kind)}"
            yield from self._made_from(value, path, depth)
        else:
            self.classes.setdefault(kind)
            yield path, class_name(kind)
            if not self._opaque(value):
                yield from self._added(value, path, depth)
            yield from self._made_from(value, path, depth)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Iterator[tuple[str, str]]:
        """Entry by entry; the order of the keys counts, since code may go through them."""
        if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):  # a cache
            yield path, type(value).__qualname__
            return
        pairs = [(k, constant_text(k), v) for k, v in value.items() if k not in VOLATILE]
        keys = [text for _, text, _ in pairs if text is not None]
        order = "" if keys == sorted(keys) else f" in the order {digest(chr(10).join(keys))}"
        yield path, f"{type(value).__qualname__} of {len(value)}{order}"
        ordered = sorted(pairs, key=lambda p: str(p[1])) if len(keys) == len(pairs) else pairs
        for i, (k, text, v) in enumerate(ordered):
            if text is None:
                yield from self._walk(k, f"{path} key {i}", depth + 1)
            yield from self._walk(v, f"{path}[{text or f'?{i}'}]", depth + 1)
        if hasattr(value, "default_factory"):
            yield from self._walk(value.default_factory, f"{path} default", depth + 1)
        yield from self._added(value, path, depth)

    def _added(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        """The attributes of an object, and what it is besides where its class is derived from a plain one."""
        for base in (int, float, complex, str, bytes):
            if isinstance(value, base):
                yield f"{path} value", base.__repr__(value)
        for name, v in sorted(self._attributes(value), key=lambda item: item[0]):
            if name not in VOLATILE and name != "__doc__":
                yield from self._walk(v, f"{path}.{name}", depth + 1)

    def _made_from(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        """What an object in C of the standard library is made from: ``Decimal``, ``itemgetter``, ``bytearray``, …"""
        kind = type(value)
        if reference_text(value) is not None or hasattr(value, "__dict__") or top_package(kind) in _PROCESS:
            return
        if not is_stable(kind):
            return
        try:
            made = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 whatever an object raises that cannot be taken apart
            return
        if isinstance(made, tuple):
            yield from self._walk(list(made[1:3]), f"{path} of", depth + 1)

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
