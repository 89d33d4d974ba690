"""Passes as values, run in a declared order with a verifier between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from cannopy.fx_passes import dump, regions
from cannopy.fx_passes.collection import no_collection
from cannopy.fx_passes.graph import where
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.snapshot import Snapshot
from cannopy.fx_passes.verifier import Verifier, VerifyError


@dataclass(frozen=True)
class Pass:
    """One step over a program. ``run`` changes the program in place and returns how many changes it made.

    ``requires`` and ``ensures`` are facts by name ("normalised"): what must be ensured by an earlier pass, and what
    holds afterwards.
    """

    name: str
    run: Callable[[Program], int]
    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. Nodes count for the whole model, changes for the layers that the pass saw (`regions`)."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changes: int


class PassOrderError(ValueError):
    """A pass requires what no earlier pass ensures."""


class PassError(RuntimeError):
    """A pass failed or left a program that does not verify; the program is what it was before that pass.

    ``node`` is the name of the node at fault and ``source`` the user's line, when they are known.
    """

    def __init__(self, name: str, check: str, node: fx.Node | None, expected: str, found: str) -> None:
        place = "" if node is None else f", node {node.name} ({where(node)})"
        super().__init__(f"pass {name}: {check}{place}: expected {expected}, found {found}")
        self.pass_name = name
        self.check = check
        self.node = node.name if node is not None else ""
        self.source = str(node.meta.get("source") or "") if node is not None else ""
        self.expected = expected
        self.found = found


class PassManager:
    """Runs passes in order.

    Args:
        passes: the pipeline; the order is checked against ``requires`` and ``ensures`` before anything runs.
        verify: check the program before the first pass and after each one that changed something.
        dump_dir: folder for numbered dumps (``000-captured.txt``, then one per pass that changed something, with
            its diff).
        given: facts that hold before the first pass.
    """

    def __init__(
        self, passes: Sequence[Pass], verify: bool = True, dump_dir: Path | None = None, given: Sequence[str] = ()
    ) -> None:
        self.passes = tuple(passes)
        self.verify = verify
        self.dump_dir = dump_dir
        _check_order(self.passes, frozenset(given))

    @property
    def text(self) -> str:
        """The pipeline as one line: pass names in order."""
        return ",".join(p.name for p in self.passes)

    def run(self, program: Program) -> list[PassRecord]:
        """Run every pass. Raises `PassError` with the program as it was before the pass that failed."""
        with no_collection():
            return self._run(program)

    def _run(self, program: Program) -> list[PassRecord]:
        verifier = self._start(program)
        folder = dump.Folder(self.dump_dir) if self.dump_dir is not None else None
        if folder is not None:
            folder.write(program, 0, "captured")
        records = []
        size = regions.size(program)
        for number, step in enumerate(self.passes, 1):
            record = _run(step, program, verifier, size)
            size = record.nodes_after
            records.append(record)
            if folder is not None and record.changes:
                folder.write(program, number, step.name)
        program.gm.recompile()
        return records

    def _start(self, program: Program) -> Verifier | None:
        if not self.verify:
            return None
        verifier = Verifier(program)
        try:
            verifier.verify(program)
        except VerifyError as e:
            raise PassError("(before the first)", e.check, e.node, e.expected, e.found) from e
        return verifier


def _check_order(passes: Sequence[Pass], given: frozenset[str]) -> None:
    ensured = set(given)
    for index, step in enumerate(passes):
        for fact in sorted(step.requires - ensured):
            later = [p.name for p in passes[index:] if fact in p.ensures]
            cure = f"put {later[0]} before it" if later else "no pass of this pipeline ensures it"
            raise PassOrderError(f"pass {step.name} requires {fact!r}, which no earlier pass ensures: {cure}")
        ensured |= step.ensures


def _run(step: Pass, program: Program, verifier: Verifier | None, size: int) -> PassRecord:
    before = Snapshot(program)
    start = time.perf_counter()
    try:
        changes = step.run(program)
        seconds = time.perf_counter() - start
        different = verifier.verify(program) if verifier is not None else 0
        if different and not changes:
            raise VerifyError("changes", None, "a graph as before from a pass that reports no change",
                              f"{different} nodes that are new, different or gone")
    except VerifyError as e:
        before.restore(program)
        raise PassError(step.name, e.check, e.node, e.expected, e.found) from e
    except Exception as e:  # roll back whatever went wrong, then let it be seen with the name of the pass
        before.restore(program)
        node = getattr(e, "node", None)
        raise PassError(step.name, "run", node if isinstance(node, fx.Node) else None, "the pass to complete",
                        f"{type(e).__name__}: {e}") from e
    after = regions.size(program) if changes or verifier is None else size
    return PassRecord(step.name, seconds, size, after, changes)
