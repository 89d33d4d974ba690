"""A call for each clause of a contract that breaks exactly this clause, made from the contract file itself.

The legal calls of the file are changed in one place, or in two that the clause speaks of, by values next to the limits
that the clause names. A clause that no such change reaches alone has an entry under ``negatives`` in the file, which
may name the clauses that necessarily break with it (``with``). A clause without a negative is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cannopy.fusion_rules.contracts import Clause, Violation, check_call, load_contract
from cannopy.fusion_rules.contracts.checker import bound
from cannopy.fusion_rules.contracts.expressions import Expression
from tests.contracts.examples import Example, examples
from tests.contracts.operators import operator

DTYPES = ("float64", "int32", "float16", "bfloat16", "float32", "int64", "int8")
LISTS: tuple[list[int], ...] = ([0], [5, 5], [0, 99], [2, 1, 0], [0, 2, 1], [1, 16], [0, 8])
BUDGET = 500
"""Calls with two changes that are tried for one clause before it counts as out of reach."""


class NoNegativeError(LookupError):
    """A clause that nothing breaks alone."""


@dataclass(frozen=True)
class Negative:
    """``example`` breaks ``clause`` and, necessarily, ``others`` on ``product``."""

    op: str
    clause: Clause
    product: str
    example: Example
    others: frozenset[str] = frozenset()

    def violations(self, *, host: bool = False) -> list[Violation]:
        """What the check finds."""
        return check_call(self.op, (), self.example.call(), self.product, host=host)


def negative(op: str, clause: Clause, *, host: bool = False) -> Negative:
    """The negative of ``clause``; `NoNegativeError` when there is none."""
    contract = load_contract(op)
    product = "atlas-a3" if "atlas-a3" in clause.products else clause.products[0]
    legal = [e for e in examples(op) if product in e.products]
    given = (contract.examples.get("negatives") or {}).get(clause.id)
    if given is not None:
        product = given.get("product", product)
        return _written(op, clause, product, legal, given, host)
    stages: tuple[Iterator[Example], ...] = (
        (c for e in legal for c in _near(e, clause)),
        (c for e in legal for name in contract.arguments for c in _argument(e, name, clause)),
        islice((d for e in legal if _applies(e, clause) for c in _near(e, clause) for d in _near(c, clause)), BUDGET),
    )
    for candidate in (c for stage in stages for c in stage):
        try:
            broken = {v.clause for v in check_call(op, (), candidate.call(), product, host=host)}
        except (TypeError, RuntimeError, ValueError):
            continue  # not of the schema's types, or not a shape at all
        if broken == {clause.id}:
            return Negative(op, clause, product, candidate)
    raise NoNegativeError(f"{op}: nothing breaks clause {clause.id} alone; write an entry of `negatives` for it, or it "
                          "can never refuse a call that the other clauses take")


def _written(op: str, clause: Clause, product: str, legal: list[Example], given: dict[str, Any],
             host: bool) -> Negative:
    example = next(e for e in legal if e.name == given["call"])
    for name, size in given.get("sizes", {}).items():
        example = example.sized(name, size)
    for name, dtype in given.get("dtypes", {}).items():
        example = example.typed(name, dtype)
    for name, value in given.get("set", {}).items():
        example = example.set(name, value)
    for name, times in given.get("repeat", {}).items():
        example = example.set(name, [example.arguments[name][0]] * times)
    found = Negative(op, clause, product, example, frozenset(given.get("with", ())))
    broken = {v.clause for v in found.violations(host=host)}
    if broken != {clause.id, *found.others}:
        raise NoNegativeError(f"{op}: the negative of clause {clause.id} breaks {sorted(broken)}")
    return found


def _expressions(clause: Clause) -> Iterator[Expression]:
    for value in (clause.value, clause.when, *clause.rules.values()):
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, Expression):
                yield one


def _numbers(clause: Clause) -> list[int]:
    """Values at and next to the limits of a clause, then some that are far from any."""
    found: set[int] = set()
    for expression in _expressions(clause):
        found |= {n.value for n in ast.walk(expression.tree) if isinstance(n, ast.Constant) and type(n.value) is int}
    allowed = clause.rules.get("in", ())
    if isinstance(allowed, list | tuple):
        found |= {v for v in allowed if type(v) is int}
    if isinstance(step := clause.rules.get("multiple_of"), int):
        found.add(step)
    near = {n + d for n in found for d in (-1, 0, 1)}
    some = near | {0, 1, 2, 3, 5, 7, 12, 17, 24, 65, 99, -1, -5}
    return [*sorted(some, key=lambda n: (n < 0, n)), 6000, 65536, 131072]


def _applies(e: Example, clause: Clause) -> bool:
    """Whether the clause speaks of this legal call at all."""
    return clause.when is None or bool(clause.when(bound(e.op, (), e.call())))


def _near(e: Example, clause: Clause) -> Iterator[Example]:
    names = {clause.argument}.union(*(x.names() for x in _expressions(clause)))
    for key in ("dtype_of", "shape_of"):
        if isinstance(other := clause.rules.get(key), str):
            names.add(other)
    if not {"in", "min", "max", "multiple_of", "equals"} & set(clause.rules):
        yield from _argument(e, clause.argument, clause)
    for name in e.dtypes:
        yield from (e.typed(name, d) for d in DTYPES if d != e.dtypes[name])
    for name in e.sizes:
        yield from (e.sized(name, n) for n in (e.sizes[name] + 1, *_numbers(clause)) if n >= 0 and n != e.sizes[name])
    for name in load_contract(e.op).arguments:
        if name in names:
            yield from _argument(e, name, clause)


def _argument(e: Example, name: str, clause: Clause) -> Iterator[Example]:
    contract = load_contract(e.op)
    (kind,) = (str(a.type) for a in operator(e.op)._schema.arguments if a.name == name)
    optional = kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if optional else kind
    value = e.arguments.get(name, contract.arguments[name])
    for other in (*_values(kind, value, clause), *([None] if optional else [])):
        if other != value or type(other) is not type(value):
            yield e.set(name, other)


def _values(kind: str, value: Any, clause: Clause) -> Iterator[Any]:
    if kind == "Tensor":
        yield from _tensors(value) if isinstance(value, str) else ("float32[2, 2]", "int32[6]", "float32[6]")
    elif kind.startswith("List[Tensor"):
        tensors = value or ["float32[2, 2]"]
        yield from ([], tensors[:1], tensors * 130, [*tensors, tensors[0]])
        yield from ([other, *tensors[1:]] for other in _tensors(tensors[0]))
    elif kind == "bool":
        yield from (True, False)
    elif kind == "str":
        known = {v for x in _expressions(clause) for n in ast.walk(x.tree) if isinstance(n, ast.Constant)
                 if isinstance(v := n.value, str)}
        yield from ("BOGUS", *sorted(known), "TND", "BSND")
    elif kind.startswith("List"):
        yield from LISTS
    elif kind == "float":
        yield 2.0
    else:
        yield from _numbers(clause)


def _tensors(text: str) -> Iterator[str]:
    kind, dims = re.match(r"(\w+)\[(.*)\]", text).groups()  # type: ignore[union-attr]
    sizes = [d.strip() for d in dims.split(",")]
    yield from (f"{dtype}[{dims}]" for dtype in DTYPES)
    for axis, size in enumerate(sizes):
        for new in (f"{size} + 1", "1", "0", f"2 * ({size})", "70000"):
            yield f"{kind}[{', '.join((*sizes[:axis], new, *sizes[axis + 1:]))}]"
        yield f"{kind}[{', '.join((*sizes[:axis], *sizes[axis + 1:]))}]"
    yield f"{kind}[{dims}, 1]"
    yield f"{kind}[1, {dims}]"
    yield f"{kind}[1, 1, 1, 1, 1, 1, 1, 1, {dims}]"
    if len(sizes) > 1:
        yield f"{kind}[{', '.join((sizes[1], sizes[0], *sizes[2:]))}]"
        yield f"{text} transposed"

