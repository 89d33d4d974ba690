"""What torchair has no working converter for  →  equal forms that it lowers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.legalise import (
    complexes,
    dialect,
    empties,
    formulas,
    grouped_mm,
    histc,
    index_copy,
    index_put,
    sort,
)
from cannopy.fx_passes.legalise.error import LegaliseError
from cannopy.fx_passes.normalise import cse, noops, views
from cannopy.fx_passes.program import Program

__all__ = ["LegaliseError", "run"]

STEPS = (complexes.run, index_copy.run, index_put.run, histc.run, grouped_mm.run, sort.run, formulas.run, empties.run)


def run(program: Program, references: Mapping[str, Callable[..., Any]]) -> int:
    """Make ``program`` one that torchair lowers; the number of operations replaced.

    ``references`` maps dialect operations by name (``attention``) to plain functions of the same arguments.
    torch_npu must be imported. Raises `LegaliseError` for an operation that has no equal legal form.
    """
    editor = Editor(program.gm)
    changes = dialect.run(editor, references)
    for step in STEPS:
        changes += step(program, editor)
    editor.sweep()
    if changes:
        for tidy in (views.run, noops.run, cse.run):
            tidy(program)
    return changes
