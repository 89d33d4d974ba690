"""The unit of compilation: one captured graph with what binds it to the user's objects.

A `Program` goes through every pass. Its graph stays functional to the end: a tensor that the model
mutates is a placeholder, its new value is an ordinary node, and one trailing ``aten.copy_`` per
mutated placeholder writes the value back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

InputKind = Literal["argument", "parameter", "buffer", "state"]
"""``argument``: a tensor among the call's arguments. ``parameter``/``buffer``: owned by the module.
``state``: a tensor that the model reaches through a plain attribute (a KV cache, a counter)."""


@dataclass(frozen=True)
class Held:
    """Entries ``start`` to ``stop`` - 1 of the ``size`` ones along ``dim`` of a tensor for one die: what a rank has."""

    dim: int
    start: int
    stop: int
    size: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of these entries of ``whole``."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape for one die where a rank has ``shape``."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class InputSpec:
    """What one placeholder of the graph is bound to at every call.

    ``source`` is a Python access path rooted at ``self`` (the module), ``args`` or ``kwargs``
    (those of the call), for example ``kwargs['cache'].layers[0].keys``.
    ``shape``, ``stride`` and ``dtype`` are those of the user's tensor; ``view`` is the shape that the graph
    sees (a view of the same storage) or None when it is the tensor itself. ``held``: the part of the tensor for one
    die that ``shape`` and ``stride`` are those of, where the graph is that of one rank and is called with a part.
    """

    name: str
    kind: InputKind
    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    view: tuple[int, ...] | None = None
    mutated: bool = False
    held: Held | None = None

    def part(self, held: Held) -> InputSpec:
        """The binding to that part of the tensor: dense, its dimensions in the order that they have in memory."""
        shape = (*self.shape[: held.dim], held.stop - held.start, *self.shape[held.dim + 1 :])
        stride, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            stride[dim], step = step, step * shape[dim]
        return replace(self, shape=shape, stride=tuple(stride), held=held)


@dataclass(frozen=True)
class OutputSpec:
    """How to rebuild the eager method's result from the graph's tensors without Dynamo.

    ``treespec`` is the serialised pytree of the result (`torch.utils._pytree.treespec_dumps`) when the
    result is made of registered containers. Each leaf is ``("tensor", i)`` for graph output ``i``,
    ``("source", path)`` for an object or tensor that the caller passed in (returned by identity),
    ``("view", (path, shape, stride, offset))`` for a view of the tensor at ``path`` (strides and the offset from its
    first element count elements) or ``("const", value)``.
    """

    treespec: str
    leaves: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class WeightEntry:
    """A weight that the final graph reads and the user's model does not have.

    It is a placeholder of the final graph like any other. Its value is built once at load time, never per step:
    ``recipe`` is a Python expression over ``w[0]``, ``w[1]``, … (the tensors bound to the placeholders named in
    ``sources``) and ``torch``. The text is stored with the artifact and is part of the cache key.
    ``nz`` asks for FRACTAL_NZ (format 29) on a device; a host ignores it.
    """

    name: str
    sources: tuple[str, ...]
    recipe: str
    nz: bool = False

    def build(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight, contiguous, from the tensors at `sources` in that order."""
        return self.expression(tensors).detach().contiguous()

    def expression(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the recipe gives, which may be a view of one of ``tensors``."""
        value: torch.Tensor = eval(self.recipe, {"torch": torch, "w": tuple(tensors)})  # noqa: S307 our own text
        return value


@dataclass
class Program:
    """A graph on its way from capture to emission.

    ``normal_form`` belongs to `normalise`: what it knows of the graph since it ran last.
    """

    gm: fx.GraphModule
    inputs: list[InputSpec]
    output: OutputSpec
    weights: list[WeightEntry] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    normal_form: Any = field(default=None, repr=False, compare=False)
    _positions: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def spec(self, name: str) -> InputSpec:
        """The binding of placeholder ``name``; KeyError if there is none."""
        return self.inputs[self.position(name)]

    def position(self, name: str) -> int:
        """Where the binding of placeholder ``name`` stands in ``inputs``; KeyError if there is none."""
        found = self._positions.get(name, -1)
        if not 0 <= found < len(self.inputs) or self.inputs[found].name != name:
            self._positions = {spec.name: i for i, spec in enumerate(self.inputs)}
            found = self._positions[name]
        return found
