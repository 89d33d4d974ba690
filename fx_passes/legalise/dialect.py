"""Dialect operations that no rule lowered  →  their plain ATen references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.inline import inline
from cannopy.fx_passes.legalise.error import LegaliseError

NAMESPACE = "cannopy"


def run(editor: Editor, references: Mapping[str, Callable[..., Any]]) -> int:
    """Inline every call of the dialect. ``references``: operation name without namespace → plain function."""
    changes = 0
    for node in list(editor.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", None) != NAMESPACE:
            continue
        name = node.target._schema.name.partition("::")[2]
        if name not in references:
            raise LegaliseError(node, "a plain ATen reference of each dialect operation", "none", "this is a bug")
        inline(editor, node, references[name])
        changes += 1
    return changes
