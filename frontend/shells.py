"""Models that a checkpoint fills later: their parameters are on the meta device, the buffers they compute are real."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)


class _EmptyOnMeta(TorchFunctionMode):
    """``torch.empty``, of which modules make their parameters, gives meta tensors; other factories compute."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


def shell(build: Callable[[], M]) -> M:
    """``build()`` without memory for its weights.

    What a checkpoint has (parameters, persistent buffers) is on the meta device; buffers that the model computes
    (rotary frequencies) have their values. Parameters that are one tensor stay one.
    """
    with _EmptyOnMeta():
        model = build()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                on_meta = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
                module._parameters[name] = moved.setdefault(id(value), on_meta)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to("meta")
    return model


def hollow(model: M) -> M:
    """A copy of ``model`` that is such a shell, without copying the weights."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                memo.setdefault(id(parameter), on_meta)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                memo.setdefault(id(buffer), buffer.to("meta"))
    return copy.deepcopy(model, memo)
