"""Constants by dotted name, ``section.name``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

KEYS = frozenset({"value", "unit", "fitted_on", "source"})


class UnknownConstantError(KeyError):
    """No constant has this name; the message has the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Constant:
    """One number of the time laws.

    ``fitted_on`` names the calibration files behind it, empty when it is taken as published;
    ``source`` says what it stands for or where it was published.
    """

    value: float
    unit: str
    fitted_on: str
    source: str


@dataclass(frozen=True)
class Constants:
    """All constants; a changed one gives a new object."""

    table: Mapping[str, Constant]

    def __getitem__(self, name: str) -> float:
        found = self.table.get(name)
        return (self.entry(name) if found is None else found).value

    def entry(self, name: str) -> Constant:
        """The constant with its unit and source. `UnknownConstantError` when there is none."""
        try:
            return self.table[name]
        except KeyError:
            (nearest,) = difflib.get_close_matches(name, self.table, n=1, cutoff=0.0) or ("none",)
            raise UnknownConstantError(f"unknown constant {name!r}; did you mean {nearest!r}?") from None

    def names(self, section: str = "") -> tuple[str, ...]:
        """Names in file order; those of one section when it is given."""
        return tuple(n for n in self.table if not section or n.startswith(f"{section}."))

    def replaced(self, values: Mapping[str, float]) -> Constants:
        """These constants with other values for the given names."""
        changed = {name: replace(self.entry(name), value=float(value)) for name, value in values.items()}
        return Constants(MappingProxyType({**self.table, **changed}))

    def scaled(self, name: str, factor: float) -> Constants:
        """These constants with one of them multiplied by ``factor``."""
        return self.replaced({name: self[name] * factor})


def parse(text: str, where: str) -> dict[str, Constant]:
    """The constants of one YAML text: a mapping of sections, each a mapping of name to value, unit, source."""
    found = {}
    for section, entries in (yaml.safe_load(text) or {}).items():
        for name, entry in entries.items():
            found[f"{section}.{name}"] = _constant(f"{where}: {section}.{name}", entry)
    return found


def merge(tables: Iterable[Mapping[str, Constant]]) -> Constants:
    """One set of constants. ValueError when two tables have the same name."""
    merged: dict[str, Constant] = {}
    for table in tables:
        if twice := merged.keys() & table.keys():
            raise ValueError(f"constants defined twice: {', '.join(sorted(twice))}")
        merged |= table
    return Constants(MappingProxyType(merged))


@lru_cache(maxsize=1)
def load_constants() -> Constants:
    """Everything in ``stream_scheduler/constants/*.yaml``.

    One set serves all chips: rates and sizes of a chip are in its hardware description, and the constants say
    how much of them a kernel reaches.
    """
    folder = files(__package__)
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return merge(parse((folder / name).read_text(encoding="utf-8"), name) for name in names)


def _constant(where: str, entry: Any) -> Constant:
    if not isinstance(entry, dict) or set(entry) != KEYS:
        raise ValueError(f"{where}: expected {', '.join(sorted(KEYS))}, found {entry!r}")
    return Constant(float(entry["value"]), str(entry["unit"]), str(entry["fitted_on"] or ""), str(entry["source"]))
