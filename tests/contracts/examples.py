"""Legal calls from the ``examples`` of a contract file, with sizes, dtypes or arguments changed on request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from cannopy.fusion_rules.contracts import load_contract
from cannopy.fusion_rules.contracts.expressions import Expression

_TENSOR = re.compile(r"^(\w+)\[(.*)\]( transposed)?$")


@dataclass(frozen=True)
class Example:
    """One legal call: ``arguments`` as the file writes them, ``x[T, H]`` for a tensor."""

    op: str
    name: str
    products: tuple[str, ...]
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    arguments: Mapping[str, Any]
    changed: tuple[str, ...] = field(default=())

    def call(self, device: str = "meta") -> dict[str, Any]:
        """The arguments as values; tensors are not filled."""
        return {name: self._value(value, device) for name, value in self.arguments.items()}

    def _value(self, value: Any, device: str) -> Any:
        if isinstance(value, list | tuple):
            return [self._value(v, device) for v in value]
        if isinstance(value, str) and (found := _TENSOR.match(value)):
            kind, dims, transposed = found.groups()
            shape = [int(_dim(d)(self.sizes)) for d in _split(dims)]
            tensor = torch.empty(shape, dtype=getattr(torch, self.dtypes.get(kind, kind)), device=device)
            return tensor.transpose(0, 1).contiguous().transpose(0, 1) if transposed else tensor
        return value

    def elements(self) -> int:
        """Of all tensors together."""
        flat = [v for value in self.call().values() for v in (value if isinstance(value, list) else [value])]
        return sum(v.numel() for v in flat if isinstance(v, torch.Tensor))

    def sized(self, name: str, size: int) -> Example:
        """With one size changed wherever it stands."""
        return replace(self, sizes={**self.sizes, name: size}, changed=(*self.changed, f"{name}={size}"))

    def typed(self, name: str, dtype: str) -> Example:
        """With one dtype changed wherever it stands."""
        return replace(self, dtypes={**self.dtypes, name: dtype}, changed=(*self.changed, f"{name}={dtype}"))

    def set(self, name: str, value: Any) -> Example:
        """With one argument changed."""
        return replace(self, arguments={**self.arguments, name: value}, changed=(*self.changed, f"{name}={value}"))


@cache
def _dim(text: str) -> Expression:
    return Expression.parse(text)


def _split(dims: str) -> list[str]:
    return [d.strip() for d in dims.split(",") if d.strip()]


def examples(op: str) -> Iterator[Example]:
    """The legal calls of the contract of ``op``."""
    data: Mapping[str, Any] = load_contract(op).examples
    calls: Mapping[str, Mapping[str, Any]] = data["calls"]
    for name in calls:
        arguments = dict(_inherited(calls, name))
        products = tuple(arguments.pop("products", load_contract(op).products))
        yield Example(op, name, products, data.get("sizes", {}), data.get("dtypes", {}), arguments)


def _inherited(calls: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    own = dict(calls[name])
    base = own.pop("base", None)
    return {**_inherited(calls, base), **own} if base is not None else own
