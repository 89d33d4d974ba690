"""The runs that a compiled result is measured against: the same model in eager mode, in its dtype and in float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
WIDE = {
    torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
"""What the float64 run computes in where the model says otherwise; float8 is storage, and stays."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def dtype_of(model: torch.nn.Module) -> str:
    """The dtype of most of the model's parameters, as users write it (``bf16``); empty where it has none."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    if not sizes:
        return ""
    (dtype, _), = sizes.most_common(1)
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Operations inside compute in float64, also those that the model's code puts in another floating-point dtype.

    Without it a model with ``x.float()`` computes there in float32, which has no product with a float64 weight.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchDispatchMode):
    """Widens the dtypes that operations are asked for and the tensors that they only read."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.view.dtype:  # bits, not values
            return func(*args, **(kwargs or {}))
        given = {a.name: a for a in func._schema.arguments}
        wide = [_widened(v, a) for v, a in zip(args, given.values(), strict=False)]
        out = func(*wide, **{k: _widened(v, given[k]) for k, v in (kwargs or {}).items()})
        if func is torch.ops.aten.lift_fresh.default and out.dtype in WIDE:  # torch.tensor(values, dtype=...)
            return out.to(WIDE[out.dtype])
        return out


def _widened(value: Any, argument: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDE.get(value, value)
    if isinstance(value, torch.Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE and argument.alias_info is None else value
    return type(value)(_widened(v, argument) for v in value) if type(value) in (list, tuple) else value


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``model`` in float64, to be run inside `all_in_float64`.

    Tensors in plain attributes of modules are cast as well. Experts of Hugging Face models become the eager ones,
    since grouped_mm has no float64 kernel.
    """
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.dtype in WIDE:
                vars(module)[name] = value.to(WIDE[value.dtype])
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
