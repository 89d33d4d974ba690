"""Binds the placeholders of a program to the user's objects: parameters, buffers, arguments, caches.

Dynamo's expression for a graph input becomes an access path (see `fx_passes.paths`) rooted at ``self``, ``args`` or
``kwargs``, so that a later process finds the same tensor without Dynamo.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from ..fx_passes.paths import Path, PathLookupError, PathSyntaxError, Step, attr, item, parse_expression
from ..fx_passes.program import InputKind
from .errors import CaptureError
from .failures import readable

_REGISTRIES = ("_modules", "_parameters", "_buffers", "__dict__")


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
            found = parse_expression(source)
        except PathSyntaxError:
            raise CaptureError(
                f"the method reads a tensor through {source}, which is no plain access path",
                remedy="pass torch tensors and hold them in attributes, lists or dicts with integer or string keys",
            ) from None
        base, steps = found.root, found.steps
        if base != "L" or not steps or steps[0].kind != "item":
            raise _unreachable(readable(source), "a global variable")
        root = self._root(str(steps[0].key), steps[1:])
        if root is None:
            raise _unreachable(str(steps[0].key), "a closure variable")
        exact = root
        for path in (Path(exact.root, tuple(self._pretty(exact))), exact):
            if self._leads_to(path, tensor):
                return Bound(path, _kind(exact))
        raise CaptureError(
            f"the tensor that the method reads as {exact} is not the one that this path names",
            remedy="hold the tensor in a plain attribute or a buffer, not behind a property or a descriptor",
        )

    def argument(self, source: str) -> tuple[str, Any] | None:
        """(path, value) of what Dynamo reaches by the expression ``source``; None unless it is part of an argument."""
        try:
            found = parse_expression(source)
        except PathSyntaxError:
            return None
        if found.root != "L" or not found.steps or found.steps[0].kind != "item":
            return None
        root = self._root(str(found.steps[0].key), found.steps[1:])
        if root is None or root.root == "self":
            return None
        path = Path(root.root, tuple(self._pretty(root)))
        try:
            return str(path), path.resolve(self._self, self._args, self._kwargs)
        except PathLookupError:
            return None

    def _root(self, name: str, steps: tuple[Step, ...]) -> Path | None:
        """The caller's path of parameter ``name`` followed by ``steps``; None when it is no parameter."""
        positional = -1  # the first parameter is self
        for p in self._parameters:
            if p.kind is p.VAR_POSITIONAL:
                if p.name == name and steps and isinstance(steps[0].key, int):
                    index = steps[0].key + positional  # -1: self itself is among *args (a decorator's wrapper)
                    return Path("args", (item(index), *steps[1:])) if index >= 0 else Path("self", steps[1:])
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
            return Path("args", (item(index),))
        if p.name in self._kwargs:
            return Path("kwargs", (item(p.name),))
        method = Path("self", (attr(self._name),))
        if p.kind is p.KEYWORD_ONLY:
            return method.then(attr("__kwdefaults__"), item(p.name))
        defaults = [q.name for q in self._parameters if q.default is not q.empty and q.kind is not q.KEYWORD_ONLY]
        return method.then(attr("__defaults__"), item(defaults.index(p.name)))

    @staticmethod
    def _pretty(path: Path) -> Iterator[Step]:
        """``self._modules['model']._parameters['weight']`` as ``self.model.weight``, lists of modules by index."""
        steps = iter(path.steps)
        for step in steps:
            if step.kind != "attr" or step.key not in _REGISTRIES:
                yield step
                continue
            following = next(steps, None)
            if following is not None and following.kind == "item":
                name = str(following.key)
                yield attr(name) if name.isidentifier() else item(int(name) if name.isdigit() else name)
            else:
                yield from filter(None, (step, following))

    def _leads_to(self, path: Path, tensor: torch.Tensor) -> bool:
        try:
            return path.resolve(self._self, self._args, self._kwargs) is tensor
        except PathLookupError:
            return False


def _kind(path: Path) -> InputKind:
    registry = path.steps[-2] if len(path.steps) > 1 else None
    if registry == attr("_parameters"):
        return "parameter"
    if registry == attr("_buffers"):
        return "buffer"
    if path.root != "self" and all(s.kind == "item" for s in path.steps):
        return "argument"
    return "state"


def _unreachable(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"the method reads a tensor from {what}: {name}",
        remedy="register it as a buffer of the module, or pass it as an argument; a later process could not find it",
    )
