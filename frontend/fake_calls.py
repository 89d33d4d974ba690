"""Remembers what operators make of fake tensors: equal calls on operands of equal metadata are worked out once.

A decoder makes the same few hundred calls in each of its layers. torch remembers them as well, but looking a call up
takes it five times as long as making a fake tensor. Like torch's, a remembered result says what the operator gives for
this metadata, and whose storage a view has; the tensors themselves are new each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_NAMESPACES = frozenset({"aten", "prims"})
_UNLIKE_TAGS = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
_STRIDED = frozenset({_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default})
"""Calls whose legality depends on the size of the storage, which is in no key."""
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class _Unknown(Exception):  # noqa: N818 no error: the call is made without memory
    """An argument or a result that nothing is remembered of."""


@dataclass(frozen=True)
class _Made:
    """One tensor of a result. ``owner``: which of the call's tensors it shares memory with, None for memory of its
    own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    owner: int | None


class FakeCalls(TorchDispatchMode):
    """Inside of ``mode``: answers calls that it has seen before, leaves all others to ``mode``."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._known: dict[Any, tuple[type, tuple[_Made, ...]]] = {}
        self._suited: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        suited = self._suited.get(func)
        if suited is None:
            suited = self._suited[func] = _suits(func)
        if not suited or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        tensors: list[FakeTensor] = []
        try:
            key = (func, torch.get_default_dtype(), *[self._key(a, tensors) for a in args],
                   *[(k, self._key(v, tensors)) for k, v in kwargs.items()])  # fmt: skip
        except _Unknown:
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            kind, made = known
            out = [self._tensor(one, tensors) for one in made]
            return out[0] if kind is FakeTensor else kind(out)
        result = func(*args, **kwargs)
        if tensors:
            try:
                self._known[key] = _described(result, tensors)
            except _Unknown:
                self._suited[func] = False
        return result

    def _key(self, value: Any, tensors: list[FakeTensor]) -> Any:
        """All of an argument that decides the result; ``tensors`` gets the tensors in it."""
        kind = type(value)
        if kind is FakeTensor:
            return self._tensor_key(value, tensors)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, repr(value)
        if kind is list or kind is tuple:
            return (kind, *[self._key(v, tensors) for v in value])
        raise _Unknown

    def _tensor_key(self, t: FakeTensor, tensors: list[FakeTensor]) -> Any:
        shape, dtype = t.shape, t.dtype
        if (
            t.fake_mode is not self._mode or t.constant is not None or t.layout is not torch.strided
            or dtype.is_complex or t.is_neg() or t.is_inference() or t.is_quantized
            or not all(type(n) is int for n in shape)
        ):  # fmt: skip
            raise _Unknown
        tensors.append(t)
        return dtype, shape, t.stride(), t.storage_offset(), t.fake_device, t.requires_grad

    def _tensor(self, made: _Made, tensors: list[FakeTensor]) -> FakeTensor:
        storage = None if made.owner is None else tensors[made.owner].untyped_storage()
        with in_kernel_invocation_manager(self._mode):
            value = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if storage is not None:
                value.set_(storage, made.offset, made.shape, made.stride)
        return FakeTensor(self._mode, value, made.device)


def _suits(func: Any) -> bool:
    return (
        isinstance(func, OpOverload) and func.namespace in _NAMESPACES and not func._schema.is_mutable
        and func not in _STRIDED and _UNLIKE_TAGS.isdisjoint(func.tags)
    )  # fmt: skip


def _described(result: Any, tensors: list[FakeTensor]) -> tuple[type, tuple[_Made, ...]]:
    """What there is to know of a result. `_Unknown` when it is not made of new fake tensors alone."""
    kind = type(result)
    values = [result] if kind is FakeTensor else result if kind in (list, tuple) else []
    if not values:
        raise _Unknown
    owners = {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}
    given = {id(t) for t in tensors}
    return kind, tuple([_made(value, owners, given) for value in values])


def _made(t: Any, owners: Mapping[int, int], given: set[int]) -> _Made:
    if (
        type(t) is not FakeTensor or id(t) in given or t.constant is not None or t.layout is not torch.strided
        or t.dtype.is_complex or t.is_neg() or t.requires_grad or not all(type(n) is int for n in t.shape)
    ):  # fmt: skip
        raise _Unknown
    owner = owners.get(t.untyped_storage()._cdata)
    if owner is None and t.storage_offset():
        raise _Unknown
    return _Made(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.fake_device, owner)
