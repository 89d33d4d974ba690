"""The places in the source that make a `Refusal`, and a pytest plugin that notes which of them a run came to."""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOLDERS = ("engine", "lift", "rewrite", "lower")
DEPTH = 3
"""Calls on the way to a refusal that count as places: functions that make one are called by others that do."""


@dataclass(frozen=True)
class Place:
    """A call of `Refusal`, or of a function that always returns one, in ``file`` from line ``first`` to ``last``.

    ``text`` is the source of its first argument; ``parts`` are literals of it.
    """

    file: str
    first: int
    last: int
    text: str
    parts: tuple[str, ...]


def _literals(reason: ast.expr) -> tuple[str, ...]:
    parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
    return tuple(p.value.strip() for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))


@functools.cache
def places() -> tuple[Place, ...]:
    """Every place where a rule, or what rules share, makes a refusal."""
    files = sorted(f for folder in FOLDERS for f in (ROOT / "fusion_rules" / folder).glob("*.py"))
    trees = {file: list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))) for file in files}
    functions = [node for nodes in trees.values() for node in nodes if isinstance(node, ast.FunctionDef)]
    makers = {"Refusal"} | {f.name for f in functions if ast.unparse(f.returns or f) == "Refusal"}
    alike = makers & {f.name for f in functions if ast.unparse(f.returns or f) != "Refusal"}
    assert not alike, f"{alike}: calls are told apart by name; rename what always makes a refusal or what does not"
    return tuple(
        Place(file.name, node.lineno, node.end_lineno or node.lineno, ast.unparse(node.args[0]),
              _literals(node.args[0]))
        for file, nodes in trees.items() for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers
    )


class Reached:
    """Fails a run of all tests of rules in which some reason was never given; workers of xdist report what they saw."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.whole = False
        self.deselected = False
        self.missing: list[Place] = []

    def pytest_deselected(self) -> None:
        """A selection shows nothing about what is not in it."""
        self.deselected = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Watch `Refusal` from here on when every file of this folder is in the run."""
        files = {item.path for item in session.items}
        single = any("::" in argument for argument in session.config.args)
        self.whole = not (self.deselected or single) and files.issuperset(HERE.glob("test_*.py"))
        if self.whole:
            self._watch()

    def _watch(self) -> None:
        from cannopy.fusion_rules.engine.rule import Refusal

        plain = Refusal.__init__

        @functools.wraps(plain)
        def noted(self_: Refusal, *args: Any, **kwargs: Any) -> None:
            frame: FrameType | None = sys._getframe(1)
            for _ in range(DEPTH):
                if frame is not None:
                    self.lines.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
                    frame = frame.f_back
            plain(self_, *args, **kwargs)

        Refusal.__init__ = noted  # type: ignore[method-assign]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker came to."""
        seen = getattr(node, "workeroutput", {}).get("refusals")
        if seen is not None:
            self.lines.update(map(tuple, seen))
            self.whole = True

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report to xdist's controller, or fail when a place was not reached."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["refusals"] = sorted(self.lines) if self.whole else None
        elif self.whole and not session.testsfailed and not session.config.option.collectonly:
            seen = [p for p in places() if any((p.file, n) in self.lines for n in range(p.first, p.last + 1))]
            self.missing = [p for p in places() if p not in seen]
            if self.missing and session.exitstatus == 0:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the places that were not reached."""
        if self.missing:
            terminalreporter.section("refusals that no test provoked")
            for place in self.missing:
                terminalreporter.line(f"{place.file}:{place.first}: {place.text}")
