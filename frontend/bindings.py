"""Binds the placeholders of a program to the user's objects: parameters, buffers, arguments, caches.

Dynamo's expression for a graph input becomes an access path (see `paths`) rooted at ``self``, ``args`` or ``kwargs``,
so that a later process finds the same tensor without Dynamo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..fx_passes.program import InputKind, InputSpec, Program
from .errors import BindingError, CaptureError
from .failures import readable
from .paths import Attr, Getter, Key, Path, Step, compile_path, split_expression
from .state import prepare_state

__all__ = [
    "Binder",
    "Bound",
    "call_constants",
    "check_call",
    "checker",
    "getters",
    "prepare_state",
    "resolve",
    "shared_arguments",
]

Constant = bool | int | float | str | None | torch.dtype | torch.device
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_REGISTRIES = ("_modules", "_parameters", "_buffers", "__dict__")


def resolve(path: str, self: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """The object that ``path`` names in the call ``method(*args, **kwargs)`` of ``self``.

    Raises:
        ValueError: ``path`` is malformed.
        BindingError: the path leads nowhere.
    """
    return compile_path(path)(self, args, kwargs or {})


def getters(program: Program) -> dict[str, Getter]:
    """One compiled getter per placeholder of ``program``, by placeholder name."""
    return {spec.name: compile_path(spec.source) for spec in program.inputs}


@dataclass(frozen=True)
class Bound:
    """What a Dynamo source is in the user's terms."""

    path: Path
    kind: InputKind


class Binder:
    """Translates Dynamo's sources of one call of ``method`` on ``args`` and ``kwargs``."""

    def __init__(self, method: MethodType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._self = method.__self__
        self._args = args
        self._kwargs = kwargs
        self._name = method.__name__
        self._parameters = list(inspect.signature(method.__func__, follow_wrapped=False).parameters.values())

    def bind(self, source: str, tensor: torch.Tensor) -> Bound:
        """The path that leads to ``tensor``, which Dynamo reaches by the expression ``source``.

        Raises:
            CaptureError: the tensor is not reachable from self, args or kwargs (a global, a closure, a numpy array).
        """
        try:
            base, steps = split_expression(source)
        except ValueError:
            raise CaptureError(
                f"the method reads a tensor through {source}, which is no plain access path",
                remedy="pass torch tensors and hold them in attributes, lists or dicts with integer or string keys",
            ) from None
        if base != "L" or not steps or not isinstance(steps[0], Key):
            raise _unreachable(readable(source), "a global variable")
        root = self._root(str(steps[0].value), steps[1:])
        if root is None:
            raise _unreachable(str(steps[0].value), "a closure variable")
        exact = root
        for path in (Path(exact.root, tuple(self._pretty(exact))), exact):
            if self._leads_to(path, tensor):
                return Bound(path, _kind(exact))
        raise CaptureError(
            f"the tensor that the method reads as {exact} is not the one that this path names",
            remedy="hold the tensor in a plain attribute or a buffer, not behind a property or a descriptor",
        )

    def _root(self, name: str, steps: tuple[Step, ...]) -> Path | None:
        """The caller's path of parameter ``name`` followed by ``steps``; None when it is no parameter."""
        positional = -1  # the first parameter is self
        for p in self._parameters:
            if p.kind is p.VAR_POSITIONAL:
                if p.name == name and steps and isinstance(steps[0], Key) and isinstance(steps[0].value, int):
                    index = steps[0].value + positional  # -1: self itself is among *args (a decorator's wrapper)
                    return Path("args", (Key(index), *steps[1:])) if index >= 0 else Path("self", steps[1:])
                continue
            if p.kind is p.VAR_KEYWORD:
                if p.name == name:
                    return Path("kwargs", steps)
                continue
            if p.name == name:
                return self._parameter(p, positional).then(*steps)
            positional += p.kind is not p.KEYWORD_ONLY
        return None

    def _parameter(self, p: inspect.Parameter, index: int) -> Path:
        if index < 0:
            return Path("self")
        if p.kind is not p.KEYWORD_ONLY and index < len(self._args):
            return Path("args", (Key(index),))
        if p.name in self._kwargs:
            return Path("kwargs", (Key(p.name),))
        method = Path("self", (Attr(self._name),))
        if p.kind is p.KEYWORD_ONLY:
            return method.then(Attr("__kwdefaults__"), Key(p.name))
        defaults = [q.name for q in self._parameters if q.default is not q.empty and q.kind is not q.KEYWORD_ONLY]
        return method.then(Attr("__defaults__"), Key(defaults.index(p.name)))

    @staticmethod
    def _pretty(path: Path) -> Iterator[Step]:
        """``self._modules['model']._parameters['weight']`` as ``self.model.weight``, lists of modules by index."""
        steps = iter(path.steps)
        for step in steps:
            if not isinstance(step, Attr) or step.name not in _REGISTRIES:
                yield step
                continue
            following = next(steps, None)
            if isinstance(following, Key):
                name = str(following.value)
                yield Attr(name) if name.isidentifier() else Key(int(name) if name.isdigit() else name)
            else:
                yield from filter(None, (step, following))

    def _leads_to(self, path: Path, tensor: torch.Tensor) -> bool:
        try:
            return compile_path(path)(self._self, self._args, self._kwargs) is tensor
        except BindingError:
            return False


def _kind(path: Path) -> InputKind:
    registry = path.steps[-2] if len(path.steps) > 1 else None
    if registry == Attr("_parameters"):
        return "parameter"
    if registry == Attr("_buffers"):
        return "buffer"
    if path.root != "self" and all(isinstance(s, Key) for s in path.steps):
        return "argument"
    return "state"


def _unreachable(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"the method reads a tensor from {what}: {name}",
        remedy="register it as a buffer of the module, or pass it as an argument; a later process could not find it",
    )


def call_constants(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Constant]:
    """Path → value of each non-tensor leaf of the arguments: the capture is specialised to these values.

    Lists, tuples and dicts are entered; any other object stands for itself and is not listed.
    """
    return {str(path): value for path, value in _leaves(args, kwargs) if isinstance(value, _CONSTANTS)}


def shared_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[str]]:
    """Groups of paths at which the caller passes one and the same tensor: the graph has one input for each group."""
    groups: dict[int, list[str]] = {}
    for path, value in _leaves(args, kwargs):
        if isinstance(value, torch.Tensor):
            groups.setdefault(id(value), []).append(str(path))
    return sorted(group for group in groups.values() if len(group) > 1)


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    def visit(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, list | tuple):
            for i, v in enumerate(value):
                yield from visit(v, path.then(Key(i)))
        elif isinstance(value, dict):
            for k, v in value.items():
                if isinstance(k, int | str):
                    yield from visit(v, path.then(Key(k)))
        else:
            yield path, value

    yield from visit(args, Path("args"))
    yield from visit(dict(kwargs), Path("kwargs"))


def _same_constant(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


Check = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]
"""``check(self, args, kwargs)`` raises `BindingError` for a call that a captured program does not stand for."""


def checker(program: Program) -> Check:
    """A function that refuses calls that ``program`` does not stand for; its paths are compiled here, once.

    It refuses another number of positional arguments, other keywords, another constant, one tensor in the place of
    two or two in the place of one, a changed training flag, and a tensor of another shape, stride or dtype. Its
    message names the path, the value expected and the one found.
    """
    facts = program.facts
    keywords, expected = set(facts["call"]["kwargs"]), facts["constants"]
    tensors = [(spec, compile_path(spec.source)) for spec in program.inputs]

    def check(self: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if len(args) != facts["call"]["args"]:
            raise _differs("positional arguments", facts["call"]["args"], len(args))
        if set(kwargs) != keywords:
            raise _differs("keyword arguments", sorted(keywords), sorted(kwargs))
        found = call_constants(args, kwargs)
        for path in [*expected, *(p for p in found if p not in expected)]:
            if path not in expected or path not in found or not _same_constant(expected[path], found[path]):
                raise _differs(path, expected.get(path, "a tensor"), found.get(path, "another kind of value"))
        if (shared := shared_arguments(args, kwargs)) != facts["shared"]:
            raise _differs("which arguments are one tensor", facts["shared"], shared)
        if self.training != facts["training"]:
            raise _differs("self.training", facts["training"], self.training)
        for spec, get in tensors:
            check_tensor(spec, get(self, args, kwargs))

    return check


def check_call(program: Program, self: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`checker` for a single use."""
    checker(program)(self, args, kwargs)


def check_tensor(spec: InputSpec, tensor: object) -> None:
    """Refuses ``tensor`` for the placeholder of ``spec`` when its shape, stride or dtype differs (BindingError)."""
    if not isinstance(tensor, torch.Tensor):
        raise _differs(spec.source, "a tensor", type(tensor).__name__)
    if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
        raise _differs(spec.source, f"{spec.dtype} {spec.shape}", f"{tensor.dtype} {tuple(tensor.shape)}")
    if tuple(tensor.stride()) != spec.stride and tensor.numel() > 1:
        raise _differs(f"stride of {spec.source}", spec.stride, tuple(tensor.stride()))


def _differs(what: str, expected: object, found: object) -> BindingError:
    return BindingError(
        f"this call differs from the captured one in {what}: expected {expected!r}, found {found!r}; "
        "compile again for such calls"
    )
