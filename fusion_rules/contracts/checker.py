"""Does a call keep the contract of its operator?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from .expressions import Expression, TensorFacts
from .loader import load_contract
from .model import PRODUCTS, REQUIRED, Clause, Contract, ContractError, Violation


def check_call(
    op: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    product: str = "atlas-a3",
    *,
    host: bool = False,
    graph: bool = True,
    cann: str | None = None,
) -> list[Violation]:
    """Every clause of `op`'s contract that the call breaks on `product`; empty if it may be emitted.

    Tensors may be real, fake or meta: only shape, dtype and contiguity are read, so contents (index ranges,
    prefix sums) are not checked here. ``host=True`` adds the limits of the CPU kernel; ``graph=False`` leaves out
    those of compiled graphs. ``cann`` is the version of CANN; unknown, limits of older versions hold.
    KeyError for an op without contract, ValueError for an unknown product, TypeError for arguments that the op's
    schema does not have or that are not of its types.
    """
    if product not in PRODUCTS:
        raise ValueError(f"unknown product {product!r}; known: {', '.join(PRODUCTS)}")
    names = bound(op, args, kwargs)
    try:
        return list(_broken(op, product, host, graph, cann, tuple((k, type(v), v) for k, v in names.items())))
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _broken.__wrapped__(op, product, host, graph, cann, tuple((k, type(v), v) for k, v in names.items()))


@lru_cache(maxsize=512)
def _broken(op: str, product: str, host: bool, graph: bool, cann: str | None,
            values: tuple[tuple[str, type, Any], ...]) -> list[Violation]:
    """The broken clauses; layers of one kind ask with the same values, so the last answers are kept."""
    contract = load_contract(op)
    names = {name: value for name, _, value in values}
    if (refused := _unavailable(op, contract, product, graph, cann)) is not None:
        return [refused]
    broken: list[Violation] = []
    for clause in contract.clauses + (contract.host_clauses if host else ()):
        if product not in clause.products or (clause.graph and not graph) or _lifted(clause, cann):
            continue
        try:
            if clause.when is not None and not clause.when(names):
                continue
            for expected, found in _failures(clause, names):
                broken.append(Violation(clause.id, clause.argument, expected, found, clause.source, op))
        except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
            # A clause about sizes reads what an earlier clause has found wanting (a rank, a group count of 0).
            # With none found the arguments are not even of the schema's types.
            if not broken:
                raise TypeError(f"{op}: clause {clause.id} cannot be applied to {clause.argument}: {error}") from error
    return broken


def _unavailable(op: str, contract: Contract, product: str, graph: bool, cann: str | None) -> Violation | None:
    """The violation when the operator is not to be had at all."""
    if product not in contract.products:
        return Violation("products", "(call)", f"on {', '.join(contract.products)}", f"product {product}",
                         contract.source, op)
    if graph and not contract.graph_mode:
        return Violation("graph-mode", "(call)", "outside of compiled graphs", "a call in a graph", contract.source, op)
    if contract.cann is not None and cann is not None and version_key(cann) < version_key(contract.cann):
        return Violation("cann", "(call)", f"on CANN {contract.cann} or later", f"CANN {cann}", contract.source, op)
    return None


def _lifted(clause: Clause, cann: str | None) -> bool:
    """Whether CANN is new enough not to have the limit any more."""
    limit = clause.before_cann
    return limit is not None and cann is not None and version_key(cann) >= version_key(limit)


def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a CANN version by its numbers; ``8.5.0.alpha003`` and ``8.5.RC1`` come before ``8.5.0``."""
    words = version.lower().replace("rc", ".rc").split(".")
    numbers = [int(w) for w in words if w.isdigit()]
    early = any(not w.isdigit() for w in words if w)
    return (*numbers, *[0] * (3 - len(numbers)), -1 if early else 0)


def demand(
    op: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    product: str = "atlas-a3",
    *,
    host: bool = False,
    graph: bool = True,
) -> None:
    """Raise `ContractError` with all broken clauses, if any; otherwise as `check_call`."""
    broken = check_call(op, args, kwargs, product, host=host, graph=graph)
    if broken:
        raise ContractError(op, tuple(broken))


def value_error(op: str, rule: str, found: str) -> ContractError:
    """The error for tensor contents that break value rule `rule` of `op`'s contract; to be raised by a kernel."""
    for entry in load_contract(op).value_rules:
        if entry.id == rule:
            return ContractError(op, (Violation(entry.id, entry.argument, entry.expected, found, entry.source, op),))
    raise KeyError(f"the contract of {op} has no value rule {rule!r}")


def bound(op: str, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included, as clauses see them. TypeError as `check_call`."""
    contract = load_contract(op)
    order = list(contract.arguments)
    if len(args) > len(order):
        raise TypeError(f"{op} takes {len(order)} arguments, got {len(args)}")
    given: dict[str, object] = dict(zip(order, args, strict=False))
    for name, value in kwargs.items():
        if name not in contract.arguments:
            raise TypeError(f"{op} has no argument {name!r}; it has {', '.join(order)}")
        if name in given:
            raise TypeError(f"{op} got argument {name!r} twice")
        given[name] = value
    for name, default in contract.arguments.items():
        if name not in given:
            if default == REQUIRED:
                raise TypeError(f"{op} needs argument {name!r}")
            given[name] = default
    return {name: _facts(value) for name, value in given.items()}


def _facts(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorFacts(dtype, tuple(value.shape), value.is_contiguous())
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(_facts(item) for item in value)
    return tuple(value) if isinstance(value, list) else value


def _failures(clause: Clause, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(expected, found) for each rule of the clause that does not hold. ``shape`` rules bind sizes into `names`."""
    subject = names[clause.argument]
    rules = clause.rules
    if rules.get("required") and subject is None:
        yield "given", "None"
    if rules.get("absent") and subject not in (None, [], ()):
        yield "left out", _describe(subject)
    tensors = _tensors(subject)
    for position, facts in enumerate(tensors):
        for expected, found in _tensor_failures(rules, facts, names):
            yield expected, found if len(tensors) == 1 else f"{found} in element {position}"
    if isinstance(condition := rules.get("holds"), Expression) and not condition(names):
        yield clause.expected or f"such that {condition.text}", _describe(subject)
    if _has_value_rule(rules) and (subject is not None or clause.value is not None):
        value = clause.value(names) if clause.value is not None else subject
        for expected in _value_failures(rules, value, names):
            text = clause.value.text if clause.value is not None else clause.argument
            shown = f"{text} = {_describe(value)}" if clause.value is not None else _describe(value)
            yield (f"such that {text} is {expected}" if clause.value is not None else expected), shown


def _tensors(subject: Any) -> tuple[TensorFacts, ...]:
    if isinstance(subject, TensorFacts):
        return (subject,)
    if isinstance(subject, tuple):
        return tuple(item for item in subject if isinstance(item, TensorFacts))
    return ()


def _tensor_failures(rules: Mapping[str, Any], facts: TensorFacts, names: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "dtype" in rules and facts.dtype not in rules["dtype"]:
        yield f"of dtype {' or '.join(rules['dtype'])}", facts.dtype
    if "dtype_of" in rules:
        other = _first(names[rules["dtype_of"]])
        if other is not None and facts.dtype != other.dtype:
            yield f"of the dtype of {rules['dtype_of']} ({other.dtype})", facts.dtype
    if "rank" in rules and facts.rank not in rules["rank"]:
        yield f"of rank {' or '.join(map(str, rules['rank']))}", f"shape {list(facts.shape)}"
    if "shape" in rules:
        yield from _shape_failure(rules["shape"], facts, names)
    if "shape_of" in rules:
        other = _first(names[rules["shape_of"]])
        if other is not None and facts.shape != other.shape:
            yield f"of the shape of {rules['shape_of']} {list(other.shape)}", f"shape {list(facts.shape)}"
    if rules.get("contiguous") and not facts.contiguous:
        yield "contiguous", "a non-contiguous tensor"


def _first(subject: Any) -> TensorFacts | None:
    tensors = _tensors(subject)
    return tensors[0] if tensors else None


def _shape_failure(
    pattern: Sequence[Expression], facts: TensorFacts, names: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    wanted: list[str] = []
    ok = len(pattern) == facts.rank
    for position, expression in enumerate(pattern):
        free = expression.names() - set(names)
        if not free:
            size = expression(names)
            wanted.append(expression.text if expression.text == str(size) else f"{expression.text}={size}")
            ok = ok and position < facts.rank and facts.shape[position] == size
        elif free == {expression.text} and position < facts.rank:
            names[expression.text] = facts.shape[position]
            wanted.append(expression.text)
        else:
            wanted.append(expression.text)
            ok = False
    if not ok:
        yield f"of shape [{', '.join(wanted)}]", f"shape {list(facts.shape)}"


def _has_value_rule(rules: Mapping[str, Any]) -> bool:
    return any(key in rules for key in ("in", "min", "max", "multiple_of", "power_of_two", "equals"))


def _value_failures(rules: Mapping[str, Any], value: Any, names: Mapping[str, Any]) -> Iterator[str]:
    if "in" in rules:
        allowed = [list(a) if isinstance(a, (list, tuple)) else a for a in rules["in"]]
        if (list(value) if isinstance(value, (list, tuple)) else value) not in allowed:
            yield f"one of {', '.join(map(str, allowed))}"
    if "min" in rules and value < (low := rules["min"](names)):
        yield f"at least {low}"
    if "max" in rules and value > (high := rules["max"](names)):
        yield f"at most {high}"
    if "multiple_of" in rules and value % rules["multiple_of"] != 0:
        yield f"a multiple of {rules['multiple_of']}"
    if rules.get("power_of_two") and not (value > 0 and value & (value - 1) == 0):
        yield "a power of two"
    if "equals" in rules and value != (wanted := rules["equals"](names)):
        yield f"equal to {rules['equals'].text} ({_describe(wanted)})"


def _describe(value: Any) -> str:
    if isinstance(value, TensorFacts):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return repr(list(value) if isinstance(value, tuple) else value)
