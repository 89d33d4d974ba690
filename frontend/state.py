"""Early initialisation of caches that allocate their tensors lazily.

A `transformers` StaticCache allocates on its first update. Inside a captured graph that would be Python state changed
behind the graph's back, and the cache would not be an input. Here its tensors are made beforehand, of the shapes that
the method itself would give them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import experts, failures
from .errors import CaptureError
from .fake_calls import FakeCalls
from .twin import fake_copy, on_meta


def prepare_state(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, method: str = "forward",
    device: torch.device | None = None, heads: Mapping[int, int] | None = None,
) -> int:
    """Allocates the tensors of uninitialised static caches among the arguments; returns how many layers it touched.

    The shapes come from one run of the method on fake tensors, which computes nothing. The result equals what eager
    would allocate: zeros, length 0. Layers that are initialised already are left alone. ``heads`` {id of a layer:
    number} are those that a rank of a layout has where it has a part of them.

    Raises:
        CaptureError: a cache layer is still without tensors after that run, or the run fails.
    """
    kwargs = kwargs or {}
    pending = [layer for layer in _static_layers(args, kwargs) if _uninitialised(layer)]
    if not pending:
        return 0
    twins = _run_on_fakes(model, method, args, kwargs, pending)
    for index, (layer, twin) in enumerate(zip(pending, twins, strict=True)):
        if _uninitialised(twin):
            raise CaptureError(
                f"layer {index} of the static cache ({type(layer).__name__}) gets no tensors from {method}",
                remedy="check that the call passes the cache that the model uses, with use_cache=True",
            )
        own = (heads or {}).get(id(layer), 0)
        _initialise(layer, twin, device or (torch.device("meta") if on_meta(model) else None), own)
    return len(pending)


@contextmanager
def left_alone(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Static caches among the arguments that have no tensors now have none behind the block."""
    before = [(layer, dict(vars(layer))) for layer in _static_layers(args, kwargs) if _uninitialised(layer)]
    try:
        yield
    finally:
        for layer, values in before:
            vars(layer).clear()
            vars(layer).update(values)


def _static_layers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    library = sys.modules.get("transformers.cache_utils")
    if library is None:  # without transformers there is no such cache
        return
    for value in pytree.tree_leaves((args, dict(kwargs)), is_leaf=lambda v: isinstance(v, library.Cache)):
        if isinstance(value, library.Cache):
            yield from (layer for layer in value.layers if isinstance(layer, library.StaticLayer))


def _uninitialised(layer: Any) -> bool:
    return not layer.is_initialized or not getattr(layer, "is_indexer_initialized", True)


class _AnyGroupedMm(TorchDispatchMode):
    """``_grouped_mm(x [T, K], w [E, K, N])`` in dtypes that its kernel takes and its shape function refuses.

    The CPU kernel of torch 2.13 takes float32 and float16; its meta function, which fake tensors use, bfloat16 only.
    During capture `transformers` calls its own operator instead, whose shape function takes any dtype.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == args[1].dtype != torch.bfloat16:
            x, weight = args[:2]
            if (x.dim(), weight.dim()) == (2, 3):
                return x.new_empty(x.shape[0], weight.shape[-1])
        return func(*args, **(kwargs or {}))


def _run_on_fakes(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], layers: list[Any]
) -> list[Any]:
    """The copies of ``layers`` after ``method`` has run on fake copies of everything."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = experts.capturable(model, verify=False).model
    twin, twin_args, twin_kwargs, twin_layers = fake_copy((model, args, dict(kwargs), layers), mode)
    try:
        with mode, FakeCalls(mode), _AnyGroupedMm(), torch.no_grad():
            getattr(twin, method)(*twin_args, **twin_kwargs)
    except Exception as e:  # whatever the model raises on fakes: a data-dependent branch, a missing operator
        # When every layer has its tensors the shapes are known; capture will meet the fault itself and name it.
        if any(_uninitialised(layer) for layer in twin_layers):
            raise failures.from_fake_run(e) from e
    return list(twin_layers)


def _initialise(layer: Any, twin: Any, device: torch.device | None, heads: int) -> None:
    def empty_like(t: torch.Tensor, dim: int) -> torch.Tensor:
        shape = [0 if d == dim else n for d, n in enumerate(t.shape)]
        shape[1] = heads or shape[1]
        return torch.empty(shape, dtype=t.dtype, device=device or t.device)

    with torch.no_grad():
        if not layer.is_initialized:
            empties = empty_like(twin.keys, 2), empty_like(twin.values, 2)
            taken = len(inspect.signature(layer.lazy_initialization).parameters)  # transformers 4 takes the keys only
            layer.lazy_initialization(*empties[:taken])
        if not getattr(layer, "is_indexer_initialized", True):
            layer.lazy_initialization_indexer(empty_like(twin.indexer_keys, 1))
