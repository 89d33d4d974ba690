"""Two calls of one pure operation on the same arguments  →  one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.normalise.worklist import Step, once
from cannopy.fx_passes.program import Program


class Calls:
    """The first of all equal calls of a graph, as far as it has been asked about them."""

    def __init__(self) -> None:
        self._first: dict[Any, fx.Node] = {}
        self._pure: dict[Any, bool] = {}

    @property
    def step(self) -> Step:
        """The rewrite that merges each call with the first one like it."""
        return Step("cse", None, self._visit)

    def _visit(self, program: Program, editor: Editor, node: fx.Node) -> int:
        if not self._is_pure(editor, node):
            return 0
        key = _key(node)
        first = self._first.get(key)
        if first is node:
            return 0
        if first is None or first._erased or _key(first) != key or node < first:
            self._first[key] = node
            if first is not None and not first._erased and node < first:
                editor.touched.append(first)  # it is asked about again, and is equal to an earlier call by then
            return 0
        editor.replace(node, first)
        return 1

    def _is_pure(self, editor: Editor, node: fx.Node) -> bool:
        """Mutating and random operations are never merged."""
        target = node.target
        if target not in self._pure:
            tags = getattr(target, "tags", ())
            self._pure[target] = torch.Tag.nondeterministic_seeded not in tags and not editor.is_impure(node)
        return self._pure[target]


def run(program: Program) -> int:
    """Merge equal calls. Mutating and random operations are never merged."""
    return once(program, Calls().step)


def _key(node: fx.Node) -> Any:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_frozen, value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    # 1, 1.0 and True compare equal but mean different dtypes; nan never equals itself.
    return type(value).__name__, repr(value)
