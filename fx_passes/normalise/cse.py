"""Two calls of one pure operation on the same arguments  →  one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.program import Program


def run(program: Program) -> int:
    """Merge equal calls. Mutating and random operations are never merged."""
    editor = Editor(program.gm)
    seen: dict[Any, fx.Node] = {}
    changes = 0
    for node in list(editor.graph.nodes):
        if node.op != "call_function" or not _pure(node):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in seen:
            editor.replace(node, seen[key])
            changes += 1
        else:
            seen[key] = node
    editor.sweep()
    return changes


def _pure(node: fx.Node) -> bool:
    if node.is_impure():
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, fx.Node):
        return value
    # 1, 1.0 and True compare equal but mean different dtypes; nan never equals itself.
    return type(value).__name__, repr(value)
