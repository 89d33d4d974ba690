"""The result of a compiled call: the eager method's containers around the graph's tensors.

Leaves of `OutputSpec`:

``("tensor", i)``
    output i of the graph.
``("source", path)``
    an object of the call, by identity: a cache, an argument, a buffer.
``("view", (path, shape, stride, offset))``
    a view of the tensor at ``path``; ``offset`` counts elements from that tensor's first one. The compiled result
    aliases the caller's tensor just as the eager result does.
``("const", value)``
    None, a bool, int, float, str, dtype, device or Size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..fx_passes.paths import compile_path
from ..fx_passes.program import OutputSpec
from .errors import ResultError

Builder = Callable[[Sequence[torch.Tensor], object, tuple[Any, ...], Mapping[str, Any]], Any]
"""``build(tensors, self, args, kwargs)``: ``tensors`` are the outputs of the final graph in order."""

_Leaf = Callable[[Sequence[torch.Tensor], object, tuple[Any, ...], Mapping[str, Any]], Any]


def builder(spec: OutputSpec) -> Builder:
    """A function that rebuilds results described by ``spec``; all parsing is done here, once.

    Raises:
        ResultError: a container class of the result is not registered with pytree in this process.
    """
    try:
        tree = pytree.treespec_loads(spec.treespec)
    except (NotImplementedError, ValueError, KeyError) as e:
        raise ResultError(
            f"the result's containers are unknown in this process ({e}); import the module that defines them first"
        ) from e
    leaves = [_leaf(kind, value) for kind, value in spec.leaves]

    def build(tensors: Sequence[torch.Tensor], self: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return pytree.tree_unflatten([leaf(tensors, self, args, kwargs) for leaf in leaves], tree)

    return build


def build(
    spec: OutputSpec,
    tensors: Sequence[torch.Tensor],
    self: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """`builder` for a single use."""
    return builder(spec)(tensors, self, args, kwargs or {})


def _leaf(kind: str, value: Any) -> _Leaf:
    if kind == "tensor":
        index = int(value)
        return lambda tensors, self, args, kwargs: tensors[index]
    if kind == "const":
        return lambda tensors, self, args, kwargs: value
    if kind == "source":
        get = compile_path(value)
        return lambda tensors, self, args, kwargs: get(self, args, kwargs)
    if kind == "view":
        path, shape, stride, offset = value
        base_of = compile_path(path)

        def view(_: Sequence[torch.Tensor], self: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            base = base_of(self, args, kwargs)
            return base.as_strided(shape, stride, base.storage_offset() + offset)

        return view
    raise ResultError(f"unknown kind of result leaf: {kind!r}")
