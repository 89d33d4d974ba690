"""Rewrites of single nodes until none applies, looking only at nodes where something may have changed.

A step is asked about a node when the node is new or different, or when a node that the step may read from there is: an
operand, an operand's operand, … up to `REACH` operations away, and any distance through `TRANSPARENT` ones. Steps that
also read users or the whole history of a value name those operators as ``far``: they are asked about them whenever
anything changed. The result is that of asking every step about every node in every round, in the same order.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.program import Program

REACH = 3
TRANSPARENT = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.slice_scatter.default, aten.expand.default, aten._to_copy.default, operator.getitem,
})

Visit = Callable[[Program, Editor, fx.Node], int]


@dataclass(frozen=True)
class Step:
    """One rewrite: ``visit`` changes the graph around a call of one of ``targets`` (None: of anything) or returns 0.

    It adds nodes in front of that call only. ``far`` are those of its targets that it is asked about in any case.
    """

    name: str
    targets: frozenset[Any] | None
    visit: Visit
    far: frozenset[Any] = frozenset()


def once(program: Program, step: Step) -> int:
    """Ask ``step`` about every node of the graph, first to last; the number of changes."""
    editor = Editor(program.gm)
    calls = [n for n in editor.graph.nodes if n.op == "call_function" and (
        step.targets is None or n.target in step.targets)]
    changes = sum(step.visit(program, editor, node) for node in calls if not node._erased)
    editor.sweep()
    return changes


class Known:
    """The nodes of a graph in normal form as they are; tells later which of them are new or different."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._nodes = {n: _print(n) for n in graph.nodes}

    def __deepcopy__(self, memo: object) -> None:
        return None

    def changed(self) -> list[fx.Node] | None:
        """The nodes that are new or different; None when the graph is the same, with no node gone either."""
        found = []
        for node in self.graph.nodes:
            before = self._nodes.get(node)
            if before is None or any(a is not b for a, b in zip(before, _print(node), strict=True)):
                found.append(node)
        return found if found or len(self._nodes) != len(self.graph.nodes) else None


def _print(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs, node.meta.get("val")


class Worklist:
    """The nodes that each of ``steps`` has yet to be asked about."""

    def __init__(self, program: Program, steps: Sequence[Step]) -> None:
        self._program = program
        self._editor = Editor(program.gm)
        self._steps = steps
        self._pending: dict[fx.Node, int] = {}
        self._masks: dict[Any, int] = {}
        self._version = 1
        self._seen = [0] * len(steps)

    def add_all(self) -> None:
        """Every step is asked about every node."""
        self._pending = {n: bits for n in self._editor.graph.nodes if (bits := self._mask(n))}

    def add(self, changed: Iterable[fx.Node]) -> list[fx.Node]:
        """Steps are asked about ``changed`` and the nodes from which they can be read; those nodes."""
        reached: dict[fx.Node, int] = {}
        stack = [(node, REACH) for node in changed]
        while stack:
            node, left = stack.pop()
            if reached.get(node, -1) >= left:
                continue
            reached[node] = left
            rest = left if node.target in TRANSPARENT else left - 1
            if rest >= 0:
                stack.extend((user, rest) for user in node.users)
        for node in reached:
            if bits := self._mask(node):
                self._pending[node] = self._pending.get(node, 0) | bits
        return list(reached)

    def round(self) -> dict[str, int]:
        """Run every step over its nodes, in order; the changes of those that made any, by name."""
        changed: dict[str, int] = {}
        for number, step in enumerate(self._steps):
            count = self._run(number, step)
            if count:
                changed[step.name] = changed.get(step.name, 0) + count
        self._pending = {n: bits for n, bits in self._pending.items() if bits and not n._erased}
        return changed

    def _mask(self, node: fx.Node) -> int:
        """One bit for each step that looks at calls like ``node``."""
        if node.op != "call_function":
            return 0
        found = self._masks.get(node.target)
        if found is None:
            found = sum(1 << i for i, s in enumerate(self._steps) if s.targets is None or node.target in s.targets)
            self._masks[node.target] = found
        return found

    def _run(self, number: int, step: Step) -> int:
        bit, editor, start = 1 << number, self._editor, self._version
        heap = [n for n, bits in self._pending.items() if bits & bit and not n._erased]
        if self._seen[number] != start:
            for target in step.far:
                heap += editor.graph.find_nodes(op="call_function", target=target, sort=False)
        heap = sorted(set(heap))  # in graph order; a sorted list is a heap
        queued = set(heap)
        changes = 0
        while heap:
            node = heapq.heappop(heap)
            if node._erased:
                continue
            self._pending[node] = self._pending.get(node, 0) & ~bit
            count = step.visit(self._program, editor, node)
            changes += count
            if not (count or editor.made or editor.touched):
                continue
            self._version += 1
            for near in self.add([*editor.made, *editor.touched, *([] if node._erased else [node])]):
                # What stands in front of the node has had its turn; a new node gets one in the next round.
                if near not in queued and near > node and self._pending.get(near, 0) & bit:
                    queued.add(near)
                    heapq.heappush(heap, near)
            editor.made.clear()
            editor.touched.clear()
        self._seen[number] = start
        if self._version != start:
            editor.sweep()
        return changes
