"""Which variables of the environment a model's own code may read.

A name that stands in the code that reads is one of them, set or not. Names can come from elsewhere, too: a helper is
given one, a table or an attribute has it, or it is put together behind a beginning. So as soon as any code of the
model's reads the environment, every variable counts whose name is a string that the model's code or objects have, or
begins with a string in capitals of the code that reads.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

from cannopy.backend.cache.text import constant_text

_READERS = frozenset({"environ", "getenv", "environb", "getenvb"})
_BEGINNING = re.compile(r"[A-Z][A-Z0-9]*_?[A-Z0-9_]*")
_DEPTH = 6


class Environment:
    """Collects strings and decides which variables count."""

    def __init__(self) -> None:
        self._read = False
        self._named: set[str] = set()
        self._near: set[str] = set()
        self._strings: set[str] = set()

    def code(self, code: types.CodeType, values: Iterable[Any]) -> None:
        """A function of the model's; ``values`` are those that it reads by name or holds."""
        values = list(values)
        constants = set(strings(code.co_consts))
        reads = not _READERS.isdisjoint(_all_names(code)) or any(map(is_environment, values))
        self._strings |= constants
        if reads:
            self._read = True
            self._named |= {s for s in constants if s.isidentifier()}
            self._near |= constants | set(strings(values))

    def note(self, value: Any) -> None:
        """Something that code reads by name, or that an object of the model's has."""
        self._strings |= set(strings(value))

    def items(self) -> dict[str, str]:
        """``environment NAME`` -> value, folders by their last name."""
        if not self._read:
            return {}
        begins = tuple(s for s in self._near if len(s) > 1 and _BEGINNING.fullmatch(s))
        known = self._strings | self._near
        found = self._named | {n for n in os.environ if n in known or n.startswith(begins)}
        return {f"environment {n}": constant_text(os.environ.get(n)) or "" for n in found}


def is_environment(value: Any) -> bool:
    """Whether a value is the environment itself or the function that reads it."""
    return value is os.environ or value is os.getenv or value is getattr(os, "environb", os.environ)


def strings(value: Any, depth: int = 0) -> Iterator[str]:
    """The strings in a value: itself, in code, in plain containers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, types.CodeType):
        yield from strings(value.co_consts, depth)
    elif depth < _DEPTH and type(value) in (list, tuple, set, frozenset, dict):
        for v in list(value):
            yield from strings(v, depth + 1)
        if isinstance(value, dict):
            for v in list(value.values()):
                yield from strings(v, depth + 1)


def _all_names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            found |= _all_names(c)
    return found
