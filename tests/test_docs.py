"""The generated pages are what the rules and contracts say now, and say it of each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["fusions.md", "contracts.md", "kernels.md", "chips.md"])
def test_page_is_current(generate: ModuleType, name: str) -> None:
    found = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert found == generate.PAGES[name](), f"docs/{name} is old: make docs"


def test_every_limit_is_in_words(generate: ModuleType) -> None:
    """No clause comes out empty, and the page has as many rows as the YAML files have clauses."""
    rows = [line for line in generate.contracts().splitlines() if line.startswith("| `")]
    files = list((ROOT / "fusion_rules" / "contracts").glob("*.yaml"))
    clauses = [c for f in files for c in yaml.safe_load(f.read_text(encoding="utf-8"))["clauses"]]
    assert len(files) > 10
    assert len(rows) == len(clauses)
    assert not [row for row in rows if not row.split(" | ")[1].strip()]
