"""What the function of a GE op type gets to see of one op of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cannopy.backend.ge_graph import dtypes

Tensor = torch.Tensor
Kernel = Callable[..., "Tensor | Sequence[Tensor | None] | None"]
"""Computes one op: positional arguments in the order of `Op.inputs` (None for an optional input that is not fed),
result one tensor or one per output."""

Builder = Callable[["Op"], Kernel]
"""Turns one op into its kernel once, when the graph is compiled; raises OpError for a form it does not know."""


class OpError(RuntimeError):
    """A GE op that the host engine cannot run, or that gave what the graph does not say."""


@dataclass(frozen=True)
class Op:
    """One GE op. ``inputs`` are the names of its inputs by position; ``consts`` the values of those that are known
    at compile time; ``attrs`` GE's protobuf attributes; ``out_dtypes`` the dtypes its descriptors declare
    (None when the graph does not say); ``origin`` the FX node it came from, if torchair noted it."""

    type: str
    name: str
    inputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    consts: Mapping[int, Tensor] = field(default_factory=dict)
    out_dtypes: tuple[torch.dtype | None, ...] = ()
    origin: str = ""
    _integers: dict[int, list[int]] = field(default_factory=dict, repr=False)

    def where(self) -> str:
        """``type 'name'`` and the FX node, for messages."""
        source = f" from FX node {self.origin}" if self.origin else ""
        return f"GE op {self.type} {self.name!r}{source}"

    def error(self, what: str) -> OpError:
        """An OpError about this op."""
        return OpError(f"{self.where()}: {what}")

    def flag(self, key: str, default: bool) -> bool:
        """Attribute ``key``, or ``default`` when the op does not carry it."""
        return bool(self.attrs[key].b) if key in self.attrs else default

    def integer(self, key: str, default: int) -> int:
        """Attribute ``key``, or ``default`` when the op does not carry it."""
        return int(self.attrs[key].i) if key in self.attrs else default

    def number(self, key: str, default: float) -> float:
        """Attribute ``key`` (GE stores single precision), or ``default`` when the op does not carry it."""
        return float(self.attrs[key].f) if key in self.attrs else default

    def text(self, key: str, default: str) -> str:
        """Attribute ``key``, or ``default`` when the op does not carry it."""
        return bytes(self.attrs[key].s).decode() if key in self.attrs else default

    def integers(self, key: str, default: Sequence[int] = ()) -> list[int]:
        """List attribute ``key``, or ``default`` when the op does not carry it."""
        return [int(i) for i in self.attrs[key].list.i] if key in self.attrs else list(default)

    def dtype(self, key: str) -> torch.dtype:
        """Attribute ``key`` as a torch dtype (an attribute holds the number of GE's DataType)."""
        if key not in self.attrs:
            raise self.error(f"attribute {key} is missing")
        value = self.attrs[key]
        number = int(value.i) or int(value.dt)
        if number not in dtypes.BY_GE_NUMBER:
            raise self.error(f"the host engine has no dtype for ge::DataType {number}")
        return dtypes.BY_GE_NUMBER[number]

    def span(self, name: str) -> slice:
        """Positions of the dynamic input ``name`` (GE calls its parts name0, name1, …)."""
        hits = [i for i, n in enumerate(self.inputs) if n.startswith(name) and n[len(name) :].isdigit()]
        if hits and hits != list(range(hits[0], hits[-1] + 1)):
            raise self.error(f"the parts of input {name} are not next to each other: {self.inputs}")
        return slice(hits[0], hits[-1] + 1) if hits else slice(0, 0)

    def at(self, name: str) -> int | None:
        """Position of input ``name``, or None when the op has no such input."""
        return self.inputs.index(name) if name in self.inputs else None


def host_ints(op: Op, position: int, value: Tensor | None = None) -> list[int]:
    """The integers of input ``position``: those known at compile time, else of ``value`` (host shapes, axes)."""
    known = op._integers.get(position)
    if known is not None:
        return known
    t = op.consts.get(position, value)
    if t is None:
        raise op.error(f"input {position} ({op.inputs[position]}) has to be given")
    integers = [int(i) for i in t.reshape(-1).tolist()]
    if position in op.consts:
        op._integers[position] = integers
    return integers
