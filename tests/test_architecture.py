"""What holds for the whole tree: imports run one way, the device path is free of the host engine, files stay small."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cannopy", "backend", "frontend", "superkernel", "stream_scheduler", "fusion_rules", "fx_passes", "models")
MAY_IMPORT = {
    "cannopy": {*FOLDERS},
    "backend": {"backend", "stream_scheduler", "fusion_rules", "fx_passes"},
    "frontend": {"frontend", "stream_scheduler", "fusion_rules", "fx_passes", "models"},
    "superkernel": {"superkernel", "stream_scheduler", "fusion_rules", "fx_passes"},
    "stream_scheduler": {"stream_scheduler", "fusion_rules", "fx_passes"},
    "fusion_rules": {"fusion_rules", "fx_passes"},
    "fx_passes": {"fx_passes"},
    "models": {"models"},
}
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, relative ones resolved against the package that the folder imports as."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = (parts if parts[0] == "cannopy" else ("cannopy", *parts))[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "importlib.import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def folder_of(module: str) -> str | None:
    """The folder that ``module`` is in, None for other people's packages."""
    first, _, rest = module.partition(".")
    if first != "cannopy":
        return None
    second = rest.partition(".")[0]
    return second if second in FOLDERS else "cannopy"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(folder)
        for line, module in imported(path)
        if (other := folder_of(module)) is not None and other not in MAY_IMPORT[folder]
    ]
    assert not wrong, "\n".join(wrong)


def test_relative_and_named_imports_are_seen() -> None:
    found = {module for path in sources(*FOLDERS) for _, module in imported(path)}
    assert "cannopy.fx_passes.paths.Path" in found
    assert "cannopy.backend.host.engine" in found
    assert {folder_of(m) for m in found} == {*FOLDERS, None}


def test_the_device_path_loads_nothing_of_the_host_engine() -> None:
    """Everything that a compilation imports at its head; the host engine comes in only where there is no device."""
    program = (
        "import sys\n"
        "from cannopy.environment import import_torch\n"
        "import_torch()\n"
        "import cannopy.api, cannopy.backend.ge_graph\n"
        "print([m for m in sys.modules if m.startswith('cannopy.backend.host.') and '.standin' not in m])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in sources(*FOLDERS, "benchmarks", "tests", "docs", "tools"):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        if (lines := text.count("\n")) > MOST_LINES:
            large.append(f"{name}: {lines} lines, at most {MOST_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    large.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    assert not large, "\n".join(large)


@pytest.mark.parametrize("folder", ["lift", "rewrite", "lower"])
def test_rule_files_have_the_rules_name_and_open_with_its_equation(folder: str) -> None:
    """A second spelling may add to the name, of the file (moe_experts_batched) or of the rule (lift_rotary_half)."""
    prefix = "lift_" if folder == "lift" else ""
    found = 0
    for path in sources(f"fusion_rules/{folder}"):
        module = importlib.import_module(f"cannopy.fusion_rules.{folder}.{path.stem}")
        for rule in [*getattr(module, "RULES", ()), *filter(None, [getattr(module, "RULE", None)])]:
            found += 1
            stem = prefix + path.stem
            assert rule.name.startswith(stem) or stem.startswith(rule.name), path.name
            assert "→" in rule.equation, rule.name
            assert "→" in (module.__doc__ or "").split("\n\n")[0], f"{path.name}: the docstring opens with the rewrite"
    assert found >= 3
