"""Time laws: microseconds of a kernel from its work and its share of the die, one law per class of kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work

from . import attention, collective, exchange, matmul, rows

Law = Callable[[Work, Chip], Parts]

LAWS: Mapping[str, Law] = MappingProxyType(
    {name: law for module in (matmul, attention, rows, exchange, collective) for name, law in module.LAWS.items()}
)
