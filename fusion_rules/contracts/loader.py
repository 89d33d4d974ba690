"""Contract files (one YAML per fused op, in this folder) to `Contract` objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from .expressions import Expression
from .model import PRODUCTS, Clause, Contract, ValueRule

_RULES = frozenset(
    {"required", "absent", "dtype", "dtype_of", "rank", "shape", "shape_of", "contiguous", "holds"}
    | {"in", "min", "max", "multiple_of", "power_of_two", "equals"}
)
_CLAUSE_KEYS = (
    frozenset({"id", "argument", "source", "products", "when", "value", "expected", "graph", "before_cann"}) | _RULES
)
_LOADER: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: contracts are read in every process that runs kernels, and it is ten times faster."""
_CONTRACT_KEYS = frozenset(
    {"op", "twins", "products", "ge_type", "graph_mode", "mutates", "cann", "source", "arguments"}
    | {"clauses", "host_clauses", "value_rules", "notes", "gain", "examples"}
)


class ContractFileError(ValueError):
    """A contract file that does not say what the format wants. The message names file and entry."""


@cache
def contract_names() -> tuple[str, ...]:
    """The ops that have a contract, functional twins included, sorted."""
    names: list[str] = []
    for stem in _stems():
        contract = _read(stem)
        names += [contract.op, *contract.twins]
    return tuple(sorted(names))


@cache
def load_contract(op: str) -> Contract:
    """The contract of `op` (``npu_rms_norm``, no namespace). KeyError with the known names if there is none."""
    for stem in _stems():
        contract = _read(stem)
        if op == contract.op or op in contract.twins:
            return contract
    raise KeyError(f"no hardware contract for {op!r}; known: {', '.join(contract_names())}")


def _stems() -> tuple[str, ...]:
    return tuple(sorted(f.name[:-5] for f in files(__package__).iterdir() if f.name.endswith(".yaml")))


@cache
def _read(stem: str) -> Contract:
    text = files(__package__).joinpath(f"{stem}.yaml").read_text(encoding="utf-8")
    return parse_contract(text, f"{stem}.yaml")


def parse_contract(text: str, file: str) -> Contract:
    """The contract in `text`; `file` is for messages. ContractFileError if it is malformed."""
    data = yaml.load(text, _LOADER)
    if not isinstance(data, dict):
        raise ContractFileError(f"{file}: expected a mapping")
    unknown = sorted(set(data) - _CONTRACT_KEYS)
    if unknown:
        raise ContractFileError(f"{file}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_CONTRACT_KEYS))}")
    missing = sorted({"op", "products", "ge_type", "source", "arguments", "clauses"} - set(data))
    if missing:
        raise ContractFileError(f"{file}: {missing[0]!r} is missing")
    products = _products(data["products"], file)
    contract = Contract(
        op=data["op"],
        twins=tuple(data.get("twins", ())),
        products=products,
        ge_type=data["ge_type"],
        graph_mode=bool(data.get("graph_mode", True)),
        mutates=tuple(data.get("mutates", ())),
        cann=data.get("cann"),
        source=data["source"],
        arguments=dict(data["arguments"]),
        clauses=tuple(_clause(c, data, file) for c in data["clauses"]),
        host_clauses=tuple(_clause(c, data, file) for c in data.get("host_clauses", ())),
        value_rules=tuple(
            ValueRule(r["id"], r["argument"], r["expected"], r.get("source", data["source"]))
            for r in data.get("value_rules", ())
        ),
        notes=tuple(data.get("notes", ())),
        gain=data.get("gain", ""),
        examples=data.get("examples", {}),
    )
    _check_names(contract, file)
    return contract


def _products(value: Any, where: str) -> tuple[str, ...]:
    products = tuple(value)
    for product in products:
        if product not in PRODUCTS:
            raise ContractFileError(f"{where}: unknown product {product!r}; known: {', '.join(PRODUCTS)}")
    return products


def _clause(data: Mapping[str, Any], contract: Mapping[str, Any], file: str) -> Clause:
    where = f"{file}: clause {data.get('id')!r}"
    unknown = sorted(set(data) - _CLAUSE_KEYS)
    if unknown:
        raise ContractFileError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_CLAUSE_KEYS))}")
    rules = {key: value for key, value in data.items() if key in _RULES}
    if "id" not in data or "argument" not in data or not rules:
        raise ContractFileError(f"{where}: needs an id, an argument and at least one of {', '.join(sorted(_RULES))}")
    try:
        when = Expression.parse(data["when"]) if "when" in data else None
        value = Expression.parse(str(data["value"])) if "value" in data else None
        for key in ("shape", "holds", "equals", "min", "max"):
            if key in rules:
                rules[key] = _expressions(rules[key])
    except ValueError as error:
        raise ContractFileError(f"{where}: {error}") from error
    products = _products(data.get("products", contract["products"]), where)
    source = data.get("source", contract["source"])
    return Clause(data["id"], data["argument"], source, products, when, value, rules, data.get("expected"),
                  bool(data.get("graph", False)), data.get("before_cann"))


def _expressions(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(Expression.parse(str(item)) for item in value)
    return Expression.parse(str(value))


def _check_names(contract: Contract, file: str) -> None:
    seen: set[str] = set()
    entries: tuple[Clause | ValueRule, ...] = (*contract.clauses, *contract.host_clauses, *contract.value_rules)
    for entry in entries:
        if entry.id in seen:
            raise ContractFileError(f"{file}: clause id {entry.id!r} is used twice")
        seen.add(entry.id)
        if entry.argument not in contract.arguments:
            raise ContractFileError(f"{file}: clause {entry.id!r} speaks of {entry.argument!r}, which is no argument")
