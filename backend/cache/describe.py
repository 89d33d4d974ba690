"""Objects as text that is equal in every process when the objects are alike: no addresses, no order of sets.

Used for the plain attributes of modules and for the call's arguments. Tensors count by dtype, shape, stride and
device type, never by value: values are inputs of the graph.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from cannopy.backend.cache.code import constant_text, top_package

_MODULE_PLUMBING = frozenset(
    k
    for k in vars(torch.nn.Module())
    if k != "training"  # _parameters, _modules, hooks, …
)
_VOLATILE = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_original_object_hash"})
"""Where a Hugging Face object came from, and a hash that differs in every process."""
_DEPTH = 12


def tensor_item(t: torch.Tensor) -> str:
    """``bfloat16[1, 96](96, 1) cpu``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}{tuple(t.stride())} {t.device.type}"


class Describer:
    """Walks objects once each; `classes` collects the classes met, `functions` the functions held as values.

    ``tree`` are the modules of the model, which are described one by one and not again where they are referred to.
    """

    def __init__(self, tree: Iterable[torch.nn.Module] = ()) -> None:
        self._tree = {id(m) for m in tree}
        self.classes: dict[type, None] = {}
        self.functions: list[Any] = []
        self._met: dict[int, str] = {}
        self._alive: list[Any] = []

    def items(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        """(path, text) of `value` and of everything reachable from it."""
        yield from self._walk(value, path, 0)

    def module_items(self, module: torch.nn.Module, path: str) -> Iterator[tuple[str, str]]:
        """(path, text) of the plain attributes of one module, its children left out."""
        self.classes.setdefault(type(module))
        yield f"{path} class", f"{type(module).__module__}.{type(module).__qualname__}"
        for name, value in sorted(vars(module).items()):
            if name not in _MODULE_PLUMBING and name not in _VOLATILE:
                yield from self._walk(value, f"{path}.{name}", 1)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self.functions += hooks.values()
            if hooks:
                yield f"{path} hooks", str(len(hooks))

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
            yield path, f"{type(value).__module__}.{type(value).__qualname__} (not looked into)"
            return
        yield from self._inside(value, path, depth)

    def _leaf(self, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            return tensor_item(value)
        if isinstance(value, enum.Enum):
            return str(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)):
            return str(value)
        if isinstance(value, type):
            self.classes.setdefault(value)
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, torch.nn.Module) and id(value) in self._tree:
            return f"module {type(value).__module__}.{type(value).__qualname__}"
        return constant_text(value)

    def _inside(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        kind = type(value)
        if isinstance(value, Mapping):
            yield path, f"{kind.__qualname__} of {len(value)}"
            for k, v in sorted(value.items(), key=lambda kv: str(kv[0])):
                if k in _VOLATILE:
                    continue
                yield from self._walk(v, f"{path}[{k!r}]" if constant_text(k) else f"{path}[?]", depth + 1)
        elif isinstance(value, (list, tuple)):
            yield path, f"{kind.__qualname__} of {len(value)}"
            for i, v in enumerate(value):
                yield from self._walk(v, f"{path}[{i}]", depth + 1)
        elif callable(getattr(value, "to_dict", None)) and hasattr(value, "model_type"):
            known = dict(value.to_dict())
            known["_attn_implementation"] = getattr(value, "_attn_implementation", None)
            known["_experts_implementation"] = getattr(value, "_experts_implementation", None)
            yield from self._walk(known, path, depth + 1)
        elif (
            (callable(value) and not hasattr(value, "__dict__"))
            or hasattr(value, "__code__")
            or hasattr(value, "__func__")
        ):
            self.functions.append(value)
            yield (
                path,
                f"function {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', kind.__qualname__)}",
            )
        else:
            self.classes.setdefault(kind)
            yield path, f"{kind.__module__}.{kind.__qualname__}"
            if top_package(kind) in ("torch", "torch_npu", "builtins") and not isinstance(value, torch.nn.Module):
                return
            for name, v in sorted(self._attributes(value)):
                if name not in _VOLATILE:
                    yield from self._walk(v, f"{path}.{name}", depth + 1)

    @staticmethod
    def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    yield name, getattr(value, name)
