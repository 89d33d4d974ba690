"""The limits of a clause in words, for documentation. Messages about calls have the numbers of the call instead."""

from __future__ import annotations

from typing import Any

from .expressions import Expression
from .model import Clause


def wording(clause: Clause) -> list[str]:
    """What ``clause`` asks of its argument, a phrase per rule: ``of dtype float16 or bfloat16``, ``E at most 2048``."""
    rules: dict[str, Any] = dict(clause.rules)
    found = [text for key, text in (("required", "given"), ("absent", "left out"), ("contiguous", "contiguous"))
             if rules.get(key)]
    if "dtype" in rules:
        found.append(f"of dtype {' or '.join(rules['dtype'])}")
    if "dtype_of" in rules:
        found.append(f"of the dtype of `{rules['dtype_of']}`")
    if "rank" in rules:
        ranks = rules["rank"]
        run = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
        found.append(f"of rank {ranks[0]} to {ranks[-1]}" if run else f"of rank {' or '.join(map(str, ranks))}")
    if "shape" in rules:
        found.append(f"of shape `[{', '.join(e.text for e in rules['shape'])}]`")
    if "shape_of" in rules:
        found.append(f"of the shape of `{rules['shape_of']}`")
    if isinstance(condition := rules.get("holds"), Expression):
        found.append(clause.expected or f"such that `{condition.text}`")
    subject = f"`{clause.value.text}` " if clause.value is not None else ""
    return found + [f"{subject}{text}" for text in _values(rules)]


def _values(rules: dict[str, Any]) -> list[str]:
    found = []
    if "in" in rules:
        found.append(f"one of {', '.join(map(str, rules['in']))}")
    for key, text in (("min", "at least"), ("max", "at most"), ("equals", "equal to")):
        if key in rules:
            found.append(f"{text} `{rules[key].text}`")
    if "multiple_of" in rules:
        found.append(f"a multiple of {rules['multiple_of']}")
    if rules.get("power_of_two"):
        found.append("a power of two")
    return found
