"""The runs that a compiled result is measured against: the same model in eager mode, in bf16 and in float64."""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``model`` in float64.

    Hugging Face norms, softmax and router still compute in float32, because their code says so: about 1e-7, next to
    the 4e-3 of bf16. Their experts become the eager ones, since grouped_mm has no float64 kernel.
    """
    twin = copy.deepcopy(model).double()
    config = getattr(twin, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    return twin


def cast_inputs(value: T, dtype: torch.dtype) -> T:
    """A deep copy of call arguments with floating tensors in ``dtype``, in containers and in attributes of objects."""
    twin = copy.deepcopy(value)
    return cast("T", _cast(twin, dtype, set()))


def _cast(value: Any, dtype: torch.dtype, seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple | dict):
        return pytree.tree_map(lambda leaf: _cast(leaf, dtype, seen), value)
    if hasattr(value, "__dict__") and id(value) not in seen and not isinstance(value, type | torch.nn.Module):
        seen.add(id(value))
        for name, child in vars(value).items():
            if name == "dtype" and isinstance(child, torch.dtype) and child.is_floating_point:
                object.__setattr__(value, name, dtype)  # a frozen dataclass (the zoo's pages) is ours to change: a copy
            else:
                object.__setattr__(value, name, _cast(child, dtype, seen))
    return value


def result_rows(out: Any) -> torch.Tensor:
    """The result that is compared, float64 [tokens, features]: ``out.logits``, or the first floating tensor in it."""
    if isinstance(getattr(out, "logits", None), torch.Tensor):
        out = out.logits
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            rows = leaf.detach().double()
            return rows.reshape(-1, rows.shape[-1]) if rows.dim() else rows.reshape(1, 1)
    raise TypeError(f"nothing to compare: no floating-point tensor in a result of type {type(out).__name__}")
