"""Every rule has its four tests, and every reason for a refusal is in a test."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

from cannopy.fusion_rules import catalog
from tests.rules.reasons import Reached, places
from tests.rules.table import TABLE

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


def test_every_reason_is_in_a_test() -> None:
    """That each is given, too, is for `Reached` to say, at the end of a run of all tests of rules."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "table.py"]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)

    def shown(part: str) -> bool:
        return any(part[i : i + PIECE] in text for i in range(max(1, len(part) - PIECE + 1)))

    own = [(p, [x for x in p.parts if len(x) >= PIECE // 2]) for p in places()]
    silent = [(p.file, p.text) for p, parts in own if parts and not any(map(shown, parts))]
    assert silent == []


def test_places_are_found_and_a_run_that_misses_one_fails() -> None:
    assert len(places()) > 70
    watch = Reached()
    watch.whole = True
    first, *rest = places()
    watch.lines = {(p.file, p.last) for p in rest}
    session = SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(collectonly=False)), testsfailed=0,
                              exitstatus=0)
    watch.pytest_sessionfinish(session)  # type: ignore[arg-type]
    assert (watch.missing, session.exitstatus) == ([first], 1)
