"""Find and read the description of a chip by its friendly or SoC name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from .model import Figure, Hardware

FAMILIES = ("atlas-a2", "atlas-a3", "atlas-950")
_TRUST = ("A", "B", "C", "D", "E")


class UnknownHardwareError(ValueError):
    """No description has this name; the message has the nearest one."""


def load_hardware(name: str) -> Hardware:
    """The chip called ``name``: a family (``atlas-a3``), an alias, or a SoC name with or without ``Ascend``.

    Case does not matter. Raises `UnknownHardwareError` with the nearest name.
    """
    wanted = name.strip().lower()
    for family in FAMILIES:
        table = _table(family)
        names = {key.lower(): soc for key, soc in _names(table).items()}
        soc = names.get(wanted) or names.get(f"ascend{wanted}")
        if soc is not None:
            return _hardware(family, soc)
    known = hardware_names()
    close = difflib.get_close_matches(wanted, [k.lower() for k in known], n=1, cutoff=0.0)
    nearest = next(k for k in known if k.lower() == close[0])
    raise UnknownHardwareError(f"unknown target {name!r}; did you mean {nearest!r}? known: {', '.join(known)}")


def hardware_names() -> tuple[str, ...]:
    """Friendly names first, then SoC names, family by family."""
    tables = [_table(family) for family in FAMILIES]
    friendly = [alias for table in tables for alias in table["names"]]
    return (*friendly, *(soc for table in tables for soc in table["parts"]))


def _names(table: Mapping[str, Any]) -> dict[str, str]:
    return {**table["names"], **{soc: soc for soc in table["parts"]}}


@cache
def _table(family: str) -> Mapping[str, Any]:
    text = (files(__package__) / f"{family}.yaml").read_text(encoding="utf-8")
    return MappingProxyType(yaml.safe_load(text))


@cache
def _hardware(family: str, soc: str) -> Hardware:
    table = _table(family)
    rows = {**table["figures"], **table["parts"][soc]}
    figures = {name: _figure(f"{family}.yaml: {soc}: {name}", row, table["sources"]) for name, row in rows.items()}
    return Hardware(soc, family, MappingProxyType(figures))


def _figure(where: str, row: object, sources: Mapping[str, str]) -> Figure:
    """``[value, unit, source key or text, trust letter]`` as a `Figure`."""
    if not isinstance(row, list) or len(row) != 4 or row[3] not in _TRUST:
        raise ValueError(f"{where}: expected [value, unit, source, trust A to E], found {row!r}")
    value, unit, source, trust = row
    return Figure(float(value), str(unit), sources.get(source, source), trust)
