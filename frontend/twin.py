"""Copies of a model and its arguments in which every tensor is fake: full size, no memory, nothing computed.

A model on the meta device is captured through such a copy, in which its tensors claim to be on the CPU. So tensors
that the model makes while it runs, and CPU arguments, fit the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

_CPU = torch.device("cpu")


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter of ``model`` is on the meta device."""
    return any(p.is_meta for p in model.parameters())


class _FakeCopies(TorchFunctionMode):
    """While active, ``copy.deepcopy`` of a tensor gives a fake tensor of the same shape, stride and dtype."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor)
            return memo[id(tensor)]
        if func is torch._C.TensorBase.clone:  # how Parameter copies its data
            return self._fake(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        device = _CPU if tensor.is_meta else tensor.device
        with torch._C.DisableTorchFunctionSubclass(), self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_copy(value: T, mode: FakeTensorMode, memo: dict[int, Any] | None = None) -> T:
    """A deep copy of ``value`` with fake tensors of ``mode`` on their own device, the CPU instead of meta.

    Attributes that name the meta device (an HF cache layer keeps one) name the CPU in the copy.
    ``memo`` gets the copy of each object by the id of the object, as `copy.deepcopy` keeps it.
    """
    with _FakeCopies(mode):
        twin = copy.deepcopy(value, memo)
    _replace_meta_devices(twin)
    return twin


def _replace_meta_devices(root: Any) -> None:
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, str | torch.Tensor | type):
            continue
        seen.add(id(value))
        holder = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        for key, child in list((holder or {}).items()):
            if isinstance(child, torch.device) and child.type == "meta" and holder is not None:
                holder[key] = _CPU
        pending += (holder or {}).values()
        if isinstance(value, list | tuple):
            pending += value
