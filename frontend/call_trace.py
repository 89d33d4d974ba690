"""The tensor operations of one eager call, written down layer by layer: what `regions` compares.

The call runs on fake copies of everything, so nothing is computed and nothing of the user's changes. Each operation
is recorded with its constants; each tensor that it reads is either a value made earlier in the same segment or an
entry of the segment's ``reads``. Two layers that do the same have equal ``ops``, whatever their weights are called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .fake_calls import FakeCalls
from .twin import fake_copy

_LARGEST_CONSTANT = 1 << 16
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Ref = tuple[Any, ...]
"""``("input", id)`` of the caller's tensor, ``("value", segment, operation, output)`` or ``("constant", digest)``."""


class IrregularError(Exception):
    """The layers of a call are not alike, or that cannot be seen; the message says why."""


@dataclass
class Segment:
    """The operations of one call of a layer, or between two layers (``layer`` None).

    ``reads``: the tensors from outside in the order of their first use; ``kinds``: their shape, stride, dtype and
    device.
    """

    layer: str | None
    ops: list[Any] = field(default_factory=list)
    reads: list[Ref] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)


@dataclass
class CallTrace:
    """One call. ``segments`` alternate: outside, layer, outside, layer, …, outside. ``result``: structure and leaves.

    ``changed``: Python attributes of the caller's objects, modules outside of the layers left out, that the call
    changes.
    """

    segments: list[Segment]
    result: tuple[Any, list[Ref]]
    changed: list[str]


def record(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], layers: Mapping[str, nn.Module]
) -> CallTrace:
    """The operations of ``model.method(*args, **kwargs)``, cut at the calls of ``layers`` (name -> submodule).

    Raises:
        IrregularError: the call cannot be run on fake tensors or does what cannot be compared.
    """
    memo: dict[int, Any] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        twin, twin_args, twin_kwargs, twin_layers = fake_copy((model, args, dict(kwargs), dict(layers)), mode, memo)
    except Exception as e:  # an object that cannot be copied raises whatever it likes
        raise IrregularError(f"the model cannot be copied to compare its layers: {type(e).__name__}: {e}") from e
    recorder = _Recorder({id(made): original for original, made in memo.items()}, list(memo.values()))
    for name, layer in twin_layers.items():
        layer.register_forward_pre_hook(recorder.entering(name), prepend=True)
        layer.register_forward_hook(recorder.leaving(name))
    try:
        with mode, FakeCalls(mode), torch.no_grad(), recorder:
            result = getattr(twin, method)(*twin_args, **twin_kwargs)
    except IrregularError:
        raise
    except Exception as e:  # whatever the model raises on fakes: a data-dependent branch, a missing operator
        head = (str(e) or type(e).__name__).splitlines()[0]
        raise IrregularError(f"the call does not run on fake tensors, so layers cannot be compared: {head}") from e
    return CallTrace(recorder.segments, recorder.result(result), list(_changes(memo, layers)))


def _changes(memo: Mapping[int, Any], layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """``Type.attribute`` of plain attributes, and of lists and dicts by their lengths, that differ from the copy's."""
    inner = {id(m) for layer in layers.values() for m in layer.modules()}
    for original in memo[id(memo)]:
        twin = memo.get(id(original))
        if isinstance(original, torch.Tensor) or (isinstance(original, nn.Module) and id(original) not in inner):
            continue
        before, after = getattr(original, "__dict__", None), getattr(twin, "__dict__", None)
        if not isinstance(before, dict) or not isinstance(after, dict):
            continue
        for key in before.keys() | after.keys():
            if not key.startswith(("_forward", "_backward")) and _differ(before.get(key), after.get(key)):
                yield f"{type(original).__name__}.{key}"


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, torch.device | torch.Tensor | nn.Module):
        return False
    if isinstance(a, _PLAIN) or isinstance(b, _PLAIN):
        return type(a) is not type(b) or (a != b and a == a)
    return isinstance(a, list | dict | set) and isinstance(b, list | dict | set) and len(a) != len(b)


class _Recorder(TorchDispatchMode):
    """Writes down every operation that reaches the dispatcher."""

    def __init__(self, originals: Mapping[int, int], alive: list[Any]) -> None:
        super().__init__()
        self.segments = [Segment(None)]
        self._originals = originals
        self._known: dict[int, Ref] = {}
        self._position: dict[Ref, Any] = {}
        self._alive = alive

    def entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            if self.segments[-1].layer is not None:
                raise IrregularError(f"{name} is called inside {self.segments[-1].layer}")
            self._open(name)

        return enter

    def leaving(self, name: str) -> Any:
        return lambda *_: self._open(None)

    def _open(self, name: str | None) -> None:
        self.segments.append(Segment(name))
        self._position = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        segment = self.segments[-1]
        call = (func, self._text(args), self._text(kwargs) if kwargs else ())
        out = func(*args, **kwargs)
        segment.ops.append((*call, self._made(out, segment)))
        return out

    def _text(self, value: Any) -> Any:
        """A comparable form of an argument; a tensor becomes its place in this segment or among its reads."""
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if isinstance(value, float):
            return ("float", repr(value))
        if isinstance(value, _PLAIN):
            return (type(value).__name__, value)
        if isinstance(value, list | tuple):
            return tuple([self._text(v) for v in value])
        if isinstance(value, dict):
            return tuple([(k, self._text(v)) for k, v in sorted(value.items())])
        if isinstance(value, torch._C.Generator):
            return ("generator", id(value))
        raise IrregularError(f"an operation takes a {type(value).__name__}, which cannot be compared between layers")

    def _place(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        ref = self._ref(tensor)
        if ref[0] == "value" and ref[1] == len(self.segments) - 1:
            return ("made", *ref[2:])
        place = self._position.get(ref)
        if place is None:
            segment = self.segments[-1]
            place = self._position[ref] = ("read", len(segment.reads))
            segment.reads.append(ref)
            segment.kinds.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, _device(tensor)))
        found: tuple[Any, ...] = place
        return found

    def _ref(self, tensor: torch.Tensor) -> Ref:
        ref = self._known.get(id(tensor))
        if ref is not None:
            return ref
        if id(tensor) in self._originals:
            ref = ("input", self._originals[id(tensor)])
        elif isinstance(tensor, FakeTensor):
            raise IrregularError("the model makes a tensor out of sight of the dispatcher (.data, a detached storage)")
        else:
            ref = _constant(tensor)
        self._known[id(tensor)] = ref
        self._alive.append(tensor)
        return ref

    def _made(self, out: Any, segment: Segment) -> Any:
        """Notes the tensors that an operation gives; the values that are no tensors, for the record."""
        at = (len(self.segments) - 1, len(segment.ops))
        rest: list[Any] = []
        for index, value in enumerate(out if isinstance(out, list | tuple) else (out,)):
            if not isinstance(value, torch.Tensor):
                rest.append(self._text(value))
            elif id(value) not in self._known and id(value) not in self._originals:
                self._known[id(value)] = ("value", *at, index)
                self._alive.append(value)
        return tuple(rest)

    def result(self, value: Any) -> tuple[Any, list[Ref]]:
        """Structure and leaves of what the call returned."""
        flat, spec = pytree.tree_flatten(value, is_leaf=lambda v: id(v) in self._originals)
        leaves: list[Ref] = []
        for leaf in flat:
            if id(leaf) in self._originals and not isinstance(leaf, _PLAIN):
                leaves.append(("input", self._originals[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                leaves.append(self._ref(leaf))
            elif isinstance(leaf, _PLAIN):
                leaves.append(("plain", repr(leaf)))
            else:
                leaves.append(("object", type(leaf).__qualname__))
        return spec, leaves


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _constant(tensor: torch.Tensor) -> Ref:
    """A real tensor among fakes: one that the model makes from Python numbers, or a global."""
    if tensor.is_meta or tensor.numel() > _LARGEST_CONSTANT:
        return ("global", id(tensor))
    with torch.utils._python_dispatch._disable_current_modes():
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return ("constant", str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest())
