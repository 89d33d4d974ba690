"""Every refusal of every rule says what was expected, what was found and what to do: read from the rules' source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cannopy import fusion_rules

FIELDS = ("reason", "node", "kind", "expected", "found", "remedy")
KINDS = {"dtype", "shape", "constant", "operation", "operand", "reader", "output", "weight", "mask", "cache",
         "contract", "missing", "order", "value"}
ROOT = Path(next(iter(fusion_rules.__path__)))


def refusals() -> Iterator[tuple[str, ast.Call]]:
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node


ALL = list(refusals())


def test_they_are_found() -> None:
    assert len(ALL) > 50


@pytest.mark.parametrize(("place", "call"), ALL, ids=[place for place, _ in ALL])
def test_every_field_is_given(place: str, call: ast.Call) -> None:
    given = dict(zip(FIELDS, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
    assert set(FIELDS) <= set(given), f"{place} lacks {[f for f in FIELDS if f not in given]}"
    assert not any(isinstance(a, ast.Starred) for a in call.args)
    assert not [f for f in FIELDS if isinstance(given[f], ast.Constant) and given[f].value in ("", None)]
    if isinstance(given["kind"], ast.Constant):
        assert given["kind"].value in KINDS
