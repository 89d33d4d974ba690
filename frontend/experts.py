"""Loops over experts that depend on the data, replaced by equal methods that capture takes. The user's model stays.

`capturable` gives a twin of the model: the modules on the way to such a loop are copies that share every parameter and
buffer, and the copy's method calls `expert_math` where the loop was. Before that, the loop itself and its replacement
run in float64 on random weights of small size and on choices of every kind (all tokens to one expert, experts that
nobody chose, an expert chosen twice, weights of zero and below); they must agree, or the loop stays and says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from . import expert_math, expert_source
from .expert_check import check
from .expert_source import Loop, NotUnderstoodError

PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""What models call the gate, up and down projections of an expert."""


@dataclass(frozen=True)
class Twin:
    """``model`` can be captured as far as experts go; ``refused`` are the loops that stay, one line each.

    ``replaced`` has the path of each module whose loop was replaced.
    """

    model: nn.Module
    replaced: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass
class _Search:
    verify: bool
    classes: dict[type, tuple[Loop, ...]] = field(default_factory=dict)
    made: dict[tuple[Any, ...], type] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)


def capturable(model: nn.Module, verify: bool = True) -> Twin:
    """A twin of ``model`` without loops over experts, or the model itself when it has none that can be replaced.

    ``verify=False`` skips the numeric check, for callers that want shapes only.
    """
    search = _Search(verify)
    new: dict[int, nn.Module] = {}
    replaced = []
    for path, module in model.named_modules():
        made = _replacement(module, search)
        if made is not None:
            new[id(module)] = _as(module, made)
            replaced.append(path)
    if not replaced:
        return Twin(model, refused=tuple(search.refused))
    return Twin(_around(model, new), tuple(replaced), tuple(search.refused))


def _around(module: nn.Module, new: dict[int, nn.Module]) -> nn.Module:
    """``module`` with the modules ``new`` in it (by the id of those that they stand for), sharing everything else."""
    if id(module) in new:
        return new[id(module)]
    children = {name: None if child is None else _around(child, new) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    twin = _as(module, type(module))
    twin.__dict__["_modules"] = children
    new[id(module)] = twin
    return twin


def _as(module: nn.Module, cls: type) -> nn.Module:
    """Another object with the attributes of ``module``."""
    twin: nn.Module = object.__new__(cls)
    twin.__dict__.update(module.__dict__)
    return twin


def _replacement(module: nn.Module, search: _Search) -> type | None:
    """The class that stands for the class of ``module``, None when it stays."""
    cls = type(module)
    if cls not in search.classes:
        search.classes[cls] = _loops(cls, search)
    loops = [loop for loop in search.classes[cls] if not _other_way(module, loop)]
    if not loops:
        return None
    loop = loops[0]
    try:
        make, parts = _understood(module, loop)
        key = (cls, *parts)
        if key not in search.made:
            result = check(module, loop, make) if search.verify else "hidden"
            search.made[key] = _subclass(cls, loop, make(result, None))
    except NotUnderstoodError as e:
        search.refused[f"{loop.where}: {e}"] = None
        return None
    return search.made[key]


def _loops(cls: type, search: _Search) -> tuple[Loop, ...]:
    found = []
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if not (isinstance(function, FunctionType) and expert_source.suspicious(function)):
                continue
            if getattr(cls, function.__name__, None) is not value:  # overridden below
                continue
            try:
                loop = expert_source.find(function)
            except NotUnderstoodError as e:
                search.refused[f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}: {e}"] = None
                continue
            if loop is not None:
                found.append(loop)
    return tuple(found)


def _other_way(module: nn.Module, loop: Loop) -> bool:
    """Whether transformers' ``experts_implementation`` sends calls of the loop's method elsewhere."""
    wrapped = getattr(type(module), loop.function.__name__)
    if wrapped is loop.function:
        return False
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen not in (None, "eager")


def _subclass(cls: type, loop: Loop, routed: expert_math.Routed) -> type:
    body = {
        loop.function.__name__: expert_source.without(loop),
        expert_source.REPLACEMENT: routed,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (cls,), body)


Make = Callable[[str, expert_math.Product | None], expert_math.Routed]


def _understood(module: nn.Module, loop: Loop) -> tuple[Make, tuple[Any, ...]]:
    """How to compute the loop's experts, and what that depends on besides the class."""
    down, gate_up = getattr(module, "down_proj", None), getattr(module, "gate_up_proj", None)
    if isinstance(down, torch.Tensor) and isinstance(gate_up, torch.Tensor) and callable(getattr(module, "act_fn", 0)):
        if down.dim() != 3 or gate_up.dim() != 3:
            raise NotUnderstoodError("the stacked weights of the experts are not [E, 2I, H] and [E, H, I]")
        routed, total = down.shape[0], gate_up.shape[0]
        activation = type(module.act_fn)
        return (lambda result, product: expert_math.stacked(routed, total - routed, result, product)), (
            "stacked", routed, total, activation)
    lists = {name: child for name, child in module._modules.items() if isinstance(child, nn.ModuleList) and len(child)}
    used = [name for name in lists if name in loop.function.__code__.co_names]
    if len(used) != 1:
        raise NotUnderstoodError("the experts are neither stacked weights nor one list of modules")
    return _of_list(used[0], list(lists[used[0]]))


def _of_list(name: str, experts: list[nn.Module]) -> tuple[Make, tuple[Any, ...]]:
    real = [e for e in experts if not isinstance(e, nn.Identity)]
    behind = all(isinstance(e, nn.Identity) for e in experts[len(real) :])
    named = next((names for names in PROJECTIONS if behind and real and _gated(real, names)), None)
    if named is not None:
        return (lambda result, product: expert_math.listed(
            name, named, len(real), len(experts) - len(real), result, product)), (
                "listed", name, named, len(real), len(experts), type(real[0]))
    return (lambda result, product: expert_math.every(name, result)), (
        "every", name, tuple(type(e) for e in experts))


def _gated(experts: list[nn.Module], names: tuple[str, str, str]) -> bool:
    """Whether all are the same kind of gated MLP: three linears without bias, of one size and dtype, and ``act_fn``."""
    first = experts[0]
    sizes = [[size for name in names if (size := _linear(getattr(e, name, None))) is not None] for e in experts]
    return callable(getattr(first, "act_fn", None)) and len(sizes[0]) == 3 and all(
        type(e) is type(first) and repr(e.act_fn) == repr(first.act_fn) and size == sizes[0]
        for e, size in zip(experts, sizes, strict=True)
    )


def _linear(module: object) -> tuple[torch.Size, torch.dtype] | None:
    """Shape and dtype of the weight of a plain linear without bias; None for anything else."""
    if type(module) is not nn.Linear or module._parameters["bias"] is not None:
        return None
    return module.weight.shape, module.weight.dtype
