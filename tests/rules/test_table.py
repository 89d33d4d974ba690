"""Every rule has its four tests, and every reason for a refusal is in a test, but for a list that may only shrink."""

from __future__ import annotations

import ast
from pathlib import Path

from cannopy.fusion_rules import catalog
from tests.rules.table import OPEN, TABLE

ROOT = Path(__file__).resolve().parents[2]
PIECE = 18
"""Letters of a reason that a test has to show."""


def test_every_rule_has_its_row() -> None:
    assert set(TABLE) == {rule.name for rule in (*catalog.LIFT, *catalog.fusions())}


def test_the_tests_of_the_table_exist() -> None:
    missing = []
    for rule, row in TABLE.items():
        for kind, place in vars(row).items():
            file, _, function = place.partition("::")
            tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            if not any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body):
                missing.append(f"{rule}: {kind}: {place}")
    assert missing == []


def _literals(reason: ast.expr) -> list[str]:
    parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
    return [p.value.strip() for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def _reasons() -> dict[tuple[str, str], list[str]]:
    """The literal parts of every refusal that a rule can give in words of its own, by (file, the longest of them)."""
    found = {}
    for folder in ("lift", "rewrite", "lower"):
        for file in sorted((ROOT / "fusion_rules" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                    parts = [p for p in _literals(node.args[0]) if len(p) >= PIECE // 2]
                    if parts:
                        found[file.name, max(parts, key=len)] = parts
    return found


def test_every_reason_is_provoked_by_a_test() -> None:
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "table.py"]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)

    def shown(part: str) -> bool:
        return any(part[i : i + PIECE] in text for i in range(max(1, len(part) - PIECE + 1)))

    untested = {reason for reason, parts in _reasons().items() if not any(map(shown, parts))}
    assert untested - OPEN == set(), "a refusal without a test"
    assert OPEN - untested == set(), "tested now, or gone: take it out of OPEN"
