"""Fake values of calls. Equal calls on operands of equal metadata are run once.

A decoder has the same few hundred calls in each of its layers, and running an operator on fake tensors takes about half
a millisecond. What is remembered belongs to one graph; nothing is shared between compilations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

PURE = frozenset({"aten", "prims", "cannopy"})
"""Namespaces whose results depend on the operands' metadata only. Those of device operations may depend on the chip
that is being compiled for: they are forgotten between passes."""

STRIDED = frozenset({torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default,
                     torch.ops.aten.as_strided_scatter.default})  # fmt: skip


class _UnknownError(Exception):
    """An argument whose meaning for the operator is not known to be in a key."""


class Propagation:
    """Runs operators on fake values and remembers the results.

    A remembered result is the same object again, so several nodes may have one value: it tells nothing about which node
    is meant, and whoever changes its metadata in place changes it for all of them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._of_device: dict[Any, Any] = {}

    def renew(self) -> None:
        """Forget the results of device operations."""
        self._of_device = {}

    def __deepcopy__(self, memo: object) -> Propagation:
        return Propagation()

    def value(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mode: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """What ``target`` returns for ``args`` and ``kwargs``, in which nodes stand for their values.

        ``mode`` gives the fake mode of these values; it is asked only when the call has to be run.
        Raises KeyError for a node without a value and whatever the operator raises.
        """
        if target is operator.getitem and isinstance(args[0], fx.Node):
            several = args[0].meta["val"]
            if isinstance(several, list | tuple):
                return several[args[1]]
        key = _key(target, args, kwargs)
        known = self._known if key is not None and target.namespace in PURE else self._of_device
        if key is not None and key in known:
            return known[key]
        values, options = fx.node.map_arg((tuple(args), dict(kwargs)), lambda n: n.meta["val"])
        with mode(), torch.no_grad():
            result = target(*values, **options)
        if key is not None:
            known[key] = result
        return result

    def recalled(self, name: Any, operands: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, once for all ``operands`` (nested, with nodes or tensors) of the same metadata.

        ``name`` says what is made; it must not depend on anything else.
        """
        try:
            key = name, _frozen(operands)
        except _UnknownError:
            return make()
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _key(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What decides the result's metadata, or None when the call has to be run."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable or target in STRIDED:
        return None
    try:
        return target, tuple(map(_frozen, args)), tuple((k, _frozen(v)) for k, v in kwargs.items())
    except _UnknownError:
        return None


def _frozen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _frozen(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple):
        return (list, *map(_frozen, value))
    kind = type(value)
    if kind in (int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format) or value is None:
        return kind, value  # 1 and True are equal, their types differ
    if kind is float:
        return kind, repr(value)  # nan is not equal to itself, 0.0 is equal to -0.0
    raise _UnknownError


def _tensor(value: torch.Tensor) -> Any:
    """The metadata that operators read. Symbolic sizes, sparse and complex values are run every time.

    Where a view begins in its storage is no part of it: only the operators in `STRIDED` look at that.
    """
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        raise _UnknownError
    size, dtype = value.shape, value.dtype
    if dtype.is_complex or not all(type(d) is int for d in size):
        raise _UnknownError
    return id(value.fake_mode), dtype, tuple(size), value.stride(), value.device, value.requires_grad
