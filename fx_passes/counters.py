"""f(c₀), f(c₁), … of the counters that caches keep per layer  →  f(stack of all counters), split back.

A model with n layers adds the same number to n counters and derives the same slots from each: n small kernels each.
On one stacked tensor it is one kernel each, plus one concatenation and one split. Runs after fusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import Editor, aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.rebind import write_of

METADATA = (aten.reshape.default,)
ARITHMETIC = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.floor_divide.default,
    aten.remainder.Scalar,
    aten._to_copy.default,
    aten.expand.default,
)
"""Operations that work on each counter by itself when the counters are stacked along a new first dim."""

INTEGERS = (torch.int32, torch.int64)
MOST_NUMBERS = 4096
"""Per counter; above that a kernel's time is its data, not its launch."""


@dataclass(frozen=True)
class _Row:
    """A value that is row ``index`` of ``stack``; ``computed`` when a kernel made it."""

    stack: fx.Node
    index: int
    computed: bool


def run(program: Program) -> int:
    """Batch what is derived from counters; the number of nodes replaced."""
    editor = Editor(program.gm)
    changes = 0
    for counters in _families(editor.graph):
        changes += _Batch(editor, counters).run()
    editor.sweep()
    return changes


def _families(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Mutated 0-dim integer inputs of one dtype and device, two or more."""
    families: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor) or shape(node) != ():
            continue
        if dtype(node) in INTEGERS and write_of(node) is not None:
            families.setdefault((dtype(node), node.meta["val"].device), []).append(node)
    return [family for family in families.values() if len(family) > 1]


class _Batch:
    """The rows known so far of one family of counters."""

    def __init__(self, editor: Editor, counters: list[fx.Node]) -> None:
        self.editor = editor
        self.count = len(counters)
        self.order = {node: i for i, node in enumerate(editor.graph.nodes)}
        self.rows: dict[fx.Node, _Row] = {}
        first = next(n for n in editor.graph.nodes if n.op != "placeholder")
        like = next(iter(counters[0].users))
        with editor.before(first, like=like):
            stack = editor.call(aten.stack.default, counters, 0)
        for i, counter in enumerate(counters):
            self.rows[counter] = _Row(stack, i, computed=False)

    def run(self) -> int:
        frontier = list(self.rows)
        while frontier:
            frontier = [member for group in self._groups(frontier) for member in self._batched(group)]
        return self._put_back()

    def _groups(self, frontier: list[fx.Node]) -> list[list[fx.Node]]:
        """Calls on rows of one stack with the same other arguments, two rows or more."""
        groups: dict[Any, list[fx.Node]] = {}
        for value in frontier:
            row = self.rows[value]
            for user in value.users:
                if self._batchable(user, value):
                    key = (row.stack, user.target, _marked(user.args, value), _marked(user.kwargs, value))
                    groups.setdefault(key, []).append(user)
        wide = [g for g in groups.values() if len({self.rows[_row_argument(n, self.rows)].index for n in g}) > 1]
        return sorted(wide, key=lambda g: min(self.order[n] for n in g))

    def _batchable(self, user: fx.Node, value: fx.Node) -> bool:
        if not is_call(user, *ARITHMETIC, *METADATA) or user in self.rows or user not in self.order:
            return False
        used = [n for n in user.all_input_nodes if n in self.rows]
        times = sum(a is value for a in user.args)
        return used == [value] and times == 1 and math.prod(shape(user)) <= MOST_NUMBERS

    def _batched(self, group: list[fx.Node]) -> list[fx.Node]:
        """One call for all counters; the members become rows of its result."""
        group = sorted(group, key=self.order.__getitem__)
        node = group[0]
        source = _row_argument(node, self.rows)
        size = (self.count, *shape(node))
        with self.editor.before(node):
            operand = self.rows[source].stack
            if is_call(node, *METADATA):
                stack = self.editor.reshape(operand, size)
            else:
                gap = [1] * (len(shape(node)) - len(shape(source)))
                operand = self.editor.reshape(operand, [self.count, *gap, *shape(source)])
                args = [operand if a is source else a for a in node.args]
                if is_call(node, aten.expand.default):
                    args[1] = list(size)
                stack = self.editor.call(node.target, *args, **node.kwargs)
        if shape(stack) != size:
            raise RuntimeError(f"stacked {node.name}: expected {list(size)}, found {list(shape(stack))}")
        for member in group:
            row = self.rows[_row_argument(member, self.rows)]
            self.rows[member] = _Row(stack, row.index, row.computed or not is_call(node, *METADATA))
        return group

    def _put_back(self) -> int:
        """Give users outside the batch their rows, all cut by one split per stack.

        It stands before the first of those users: new values of counters are there only when they are written back,
        behind everything that reads the old ones.
        """
        wanted: dict[fx.Node, list[fx.Node]] = {}
        trailing = [n for n in self.order if is_call(n, aten.copy_.default)][:1]
        for node, row in self.rows.items():
            if row.computed and any(user not in self.rows for user in node.users):
                wanted.setdefault(row.stack, []).append(node)
        changes = 0
        for stack, nodes in wanted.items():
            users = [user for node in nodes for user in node.users if user not in self.rows]
            first = min((*users, *trailing), key=self.order.__getitem__)
            with self.editor.before(first, like=nodes[0]):
                cut = self.editor.call(aten.split_with_sizes.default, stack, [1] * self.count, 0)
                for node in nodes:
                    with self.editor.provenance_of(node):
                        own = self.editor.reshape(self.editor.item(cut, self.rows[node].index), shape(node))
                    self.editor.replace(node, own)
                    changes += 1
        return changes


def _row_argument(node: fx.Node, rows: dict[fx.Node, _Row]) -> fx.Node:
    return next(a for a in node.args if isinstance(a, fx.Node) and a in rows)


def _marked(value: Any, row: fx.Node) -> Any:
    """A hashable form of an argument in which the row is a mark."""
    if value is row:
        return "row"
    if isinstance(value, list | tuple):
        return tuple(_marked(v, row) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _marked(v, row)) for k, v in value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))
