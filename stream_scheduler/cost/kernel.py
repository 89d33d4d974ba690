"""What one kernel reads, writes and computes, in symbols."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import sympy


class Role(str, Enum):
    """What a tensor is to the kernel. Weights can sit in L2 before it starts; activations were just written."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    CACHE = "cache"


class SizeError(ValueError):
    """A size that is missing, unknown, not a positive number, or larger than what contains it."""


@dataclass(frozen=True)
class Size:
    """One parameter of a kernel's formulas; without a ``default`` it must be given. Values are above 0 and not below
    ``least``; fractions are expectations, such as rows per expert."""

    name: str
    meaning: str
    default: float | None = None
    least: float = 0.0

    @property
    def symbol(self) -> sympy.Symbol:
        return sympy.Symbol(self.name, positive=True)


ZERO = sympy.Integer(0)
Amounts = Mapping[Role, sympy.Expr]


@dataclass(frozen=True)
class Kernel:
    """One device kernel.

    Bytes of ``read`` and ``write`` by role of the tensor; ``macs`` multiply-accumulates on the cube in
    ``mac_dtype``; ``vector_ops`` FP32 lane operations on the vector cores; ``link_bytes`` bytes that leave this die.
    ``law`` names the time law and ``counts`` has what else it asks for, such as the independent rows or tasks that
    are spread over the cores; attention has ``qk_macs`` (of q k alone) and ``scores`` there as well. ``cube`` and
    ``vector`` say which core pools the kernel occupies. ``contract`` is the device op whose limits are in
    fusion_rules/contracts, None for kernels of plain ATen ops. ``source`` says where the formulas are from. ``at_most``
    are pairs of sizes of which the first cannot be larger than the second.
    """

    name: str
    law: str
    summary: str
    sizes: tuple[Size, ...]
    source: str
    read: Amounts = field(default_factory=dict)
    write: Amounts = field(default_factory=dict)
    macs: sympy.Expr = ZERO
    mac_dtype: str = "bf16"
    vector_ops: sympy.Expr = ZERO
    link_bytes: sympy.Expr = ZERO
    counts: Mapping[str, sympy.Expr] = field(default_factory=dict)
    cube: bool = False
    vector: bool = True
    contract: str | None = None
    at_most: tuple[tuple[str, str], ...] = ()

    def work(self, **given: float) -> Work:
        """Numbers for these sizes. `SizeError` names a size that is missing, unknown, not positive or too large."""
        sizes = self._complete(given)
        try:
            numbers = self._function(*(sizes[s.name] for s in self.sizes))
        except OverflowError:
            numbers = (math.inf,)
        if not all(map(math.isfinite, numbers)):
            raise SizeError(f"kernel {self.name}: its bytes or operations at {_listed(sizes)} are beyond all numbers")
        it = iter(numbers)
        read = {role: float(next(it)) for role in self.read}
        written = {role: float(next(it)) for role in self.write}
        macs, vector_ops, link_bytes = (float(next(it)) for _ in range(3))
        counts = {name: float(next(it)) for name in self.counts}
        return Work(self, MappingProxyType(sizes), read, written, macs, vector_ops, link_bytes, counts)

    @cached_property
    def _function(self) -> Callable[..., tuple[float, ...]]:
        expressions = [*self.read.values(), *self.write.values(), self.macs, self.vector_ops, self.link_bytes]
        expressions += self.counts.values()
        unknown = set().union(*(sympy.sympify(e).free_symbols for e in expressions)) - {s.symbol for s in self.sizes}
        if unknown:
            raise ValueError(f"kernel {self.name}: formulas use {unknown}, which are not among its sizes")
        compiled: Callable[..., tuple[float, ...]] = sympy.lambdify(
            [s.symbol for s in self.sizes], tuple(expressions), modules="math"
        )
        return compiled

    def _complete(self, given: Mapping[str, float]) -> dict[str, float]:
        names = [s.name for s in self.sizes]
        for name, value in given.items():
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
                raise SizeError(f"kernel {self.name} has no size {name!r}; did you mean {close[0]!r}? {self.usage()}")
            if not 0 < value < math.inf:
                raise SizeError(f"kernel {self.name}: size {name} must be positive and finite, found {value!r}")
            least = self.sizes[names.index(name)].least
            if value < least:
                raise SizeError(f"kernel {self.name}: size {name} is at least {least:g}, found {value!r}")
        missing = [s.name for s in self.sizes if s.default is None and s.name not in given]
        if missing:
            raise SizeError(f"kernel {self.name} needs {', '.join(missing)}: {self.usage()}")
        full = {s.name: float(given.get(s.name, s.default)) for s in self.sizes}  # type: ignore[arg-type]
        for part, whole in self.at_most:
            if full[part] > full[whole]:
                raise SizeError(f"kernel {self.name}: {part}={full[part]:g} is more than {whole}={full[whole]:g}")
        return full

    def usage(self) -> str:
        """Its sizes with defaults, as on a command line."""
        return " ".join(s.name if s.default is None else f"[{s.name}={s.default:g}]" for s in self.sizes)


@dataclass(frozen=True)
class Work:
    """A kernel at given sizes: bytes, multiply-accumulates, lane operations."""

    kernel: Kernel
    sizes: Mapping[str, float]
    read: Mapping[Role, float]
    written: Mapping[Role, float]
    macs: float
    vector_ops: float
    link_bytes: float
    counts: Mapping[str, float]

    @cached_property
    def bytes(self) -> float:
        """Bytes read and written."""
        return sum(self.read.values()) + sum(self.written.values())

    @cached_property
    def weight_bytes(self) -> float:
        return self._of(Role.WEIGHTS)

    @cached_property
    def activation_bytes(self) -> float:
        return self._of(Role.ACTIVATIONS)

    @cached_property
    def cache_bytes(self) -> float:
        return self._of(Role.CACHE)

    @property
    def flops(self) -> float:
        """Two per multiply-accumulate of the cube, one per lane operation."""
        return 2 * self.macs + self.vector_ops

    def _of(self, role: Role) -> float:
        return self.read.get(role, 0.0) + self.written.get(role, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "kernel": self.kernel.name,
            "sizes": dict(self.sizes),
            "bytes": self.bytes,
            **{f"{role.value}_bytes": self._of(role) for role in Role},
            "macs": self.macs,
            "vector_ops": self.vector_ops,
            "link_bytes": self.link_bytes,
        }


def sizes(*entries: Size | str) -> tuple[tuple[Size, ...], tuple[sympy.Symbol, ...]]:
    """Sizes and their symbols; a string is ``"name: meaning"`` or ``"name=default: meaning"``."""
    parsed = tuple(_size(e) if isinstance(e, str) else e for e in entries)
    return parsed, tuple(s.symbol for s in parsed)


def _size(text: str) -> Size:
    head, _, meaning = text.partition(": ")
    name, _, default = head.partition("=")
    return Size(name, meaning, float(default) if default else None)


def _listed(sizes: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in sizes.items())


def by_name(kernels: Iterable[Kernel]) -> Mapping[str, Kernel]:
    """Kernels by name. ValueError when a name occurs twice."""
    table: dict[str, Kernel] = {}
    for k in kernels:
        if k.name in table:
            raise ValueError(f"kernel {k.name} is defined twice")
        table[k.name] = k
    return MappingProxyType(table)
