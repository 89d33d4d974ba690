"""What a hardware contract is made of, and how a broken one is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .expressions import Expression

PRODUCTS = ("atlas-a2", "atlas-a3", "atlas-950")


@dataclass(frozen=True)
class Violation:
    """One clause that a call breaks.

    ``clause`` is the clause's id in the contract of ``op``, ``argument`` the argument it speaks of,
    ``expected`` and ``found`` are prose, ``source`` names the document the limit is from.
    """

    clause: str
    argument: str
    expected: str
    found: str
    source: str
    op: str = ""

    def __str__(self) -> str:
        where = f"{self.op}: " if self.op else ""
        return (
            f"{where}argument {self.argument!r} must be {self.expected}, found {self.found} "
            f"[clause {self.clause}; {self.source}]"
        )


class ContractError(ValueError):
    """A call that the device would refuse, or compute wrongly without saying so.

    ``op`` is the name of the operator, ``violations`` has at least one entry.
    """

    def __init__(self, op: str, violations: tuple[Violation, ...]) -> None:
        self.op = op
        self.violations = violations
        super().__init__("\n".join(str(v) for v in violations))


@dataclass(frozen=True)
class Clause:
    """One limit of an operator.

    A clause speaks of ``argument`` and holds only where ``when`` is true (None: always) and on ``products``.
    ``rules`` has the predicates of the YAML entry by name: required, absent, dtype, dtype_of, rank, shape, shape_of,
    contiguous, holds (a condition), or ``value`` (an expression, default the argument itself) with in, min, max,
    multiple_of, power_of_two, equals. ``expected`` puts a ``holds`` condition into words. ``graph`` is True for a limit
    of compiled graphs only. ``before_cann``: the limit is gone from this CANN version on.
    """

    id: str
    argument: str
    source: str
    products: tuple[str, ...]
    when: Expression | None
    value: Expression | None
    rules: Mapping[str, object]
    expected: str | None = None
    graph: bool = False
    before_cann: str | None = None


@dataclass(frozen=True)
class ValueRule:
    """A limit on the numbers inside a tensor. It cannot be checked on fake tensors; the CPU kernels check it."""

    id: str
    argument: str
    expected: str
    source: str


@dataclass(frozen=True)
class Contract:
    """The documented limits of one fused operator.

    ``arguments`` maps each argument to its default (`REQUIRED` if it has none), in the order of the schema.
    ``graph_mode`` is False for an operator that torchair cannot put into a graph: no rule may emit it. ``cann`` is the
    first CANN version that has the operator, where that is known to matter. ``examples`` are legal calls for tests and
    documentation, see `examples`.
    ``clauses`` hold on the device, ``host_clauses`` are narrower limits of the CPU kernel, ``value_rules`` speak
    of tensor contents, ``notes`` of what no check of ours can see (formats at load time, for instance).
    """

    op: str
    twins: tuple[str, ...]
    products: tuple[str, ...]
    ge_type: str
    graph_mode: bool
    mutates: tuple[str, ...]
    cann: str | None
    source: str
    arguments: Mapping[str, object]
    clauses: tuple[Clause, ...]
    host_clauses: tuple[Clause, ...] = ()
    value_rules: tuple[ValueRule, ...] = ()
    notes: tuple[str, ...] = field(default=())
    gain: str = ""
    examples: Mapping[str, object] = field(default_factory=dict)


REQUIRED = "required"
"""Marks an argument without default in `Contract.arguments`."""
