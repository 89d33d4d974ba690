"""Checks that a lowered graph carries its plan: attributes on the intended ops, waits and prefetches as edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from cannopy.backend.ge_graph import proto
from cannopy.backend.ge_graph.op_types import METADATA
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.emission import marks, scope_runs
from cannopy.stream_scheduler.plan.model import Plan

MAY_VANISH = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("permute", "transpose", "t", "view", "reshape", "expand", "alias", "clone", "_to_copy", "squeeze",
                 "unsqueeze", "detach", "lift_fresh_copy")
    if hasattr(getattr(torch.ops.aten, name), "default")
) | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int}
"""Operators of which nothing need be left: torchair writes views onto what they view, GE drops casts without effect."""

BESIDE = frozenset({"Transpose", "TransData", "Cast", "BroadcastTo", "Expand"})
"""Ops that converters put in front of the op of a call: other memory, another dtype, another shape."""

TEXTS = (marks.STREAM, marks.PRIORITY, marks.CUBE, marks.VECTOR, marks.SUPER_KERNEL, marks.SUPER_KERNEL_OPTIONS)


def check(ge_graph: Any, program: Program, plan: Plan) -> list[str]:
    """What is wrong with ``ge_graph`` (torchair's GraphDef), lowered from the graph of ``program`` into which ``plan``
    was written; empty when nothing is.

    torchair notes the traced call on the op that it becomes; calls of one operator keep their order, which is how
    kernels are found again. Operators that tracing takes apart (a matmul of several dims) or that torchair makes a part
    of a view (a permute, a cast without effect) are not found so: what they have become stands between the kernels
    around them, and some op there has to have their attributes, unless nothing need be left of them.
    """
    return _Check(ge_graph, program, plan).run()


class _Check:
    def __init__(self, ge_graph: Any, program: Program, plan: Plan) -> None:
        self.plan = plan
        self.ops = list(ge_graph.op)
        self.by_name = {op.name: op for op in self.ops}
        self.runs = {n: run.attributes for run in scope_runs(program.gm.graph) for n in run.calls}
        self.found = _pair(program.gm.graph, self.ops)
        self.targets = {n.name: n.target for n in self.runs}
        self.wrong: list[str] = []
        self.gaps = self._gaps()

    def run(self) -> list[str]:
        self._attributes()
        self._unplanned()
        self._waits()
        self._prefetches()
        return self.wrong

    def _attributes(self) -> None:
        placed = self.plan.by_node
        for node, expected in self.runs.items():
            if node.name not in placed:
                continue
            op = self.found.get(node.name)
            if op is None:
                near = self.ops[slice(*self.gaps[node.name][1])]
                if expected and node.target not in MAY_VANISH and all(attributes(o) != expected for o in near):
                    self.wrong.append(f"no op for kernel {node.name} ({node.target}) was found in the lowered graph "
                                      f"with what the plan gives it, {dict(expected)}")
                continue
            have = attributes(op)
            if have != expected:
                self.wrong.append(f"op {op.name} of kernel {node.name} has {have}; the plan says {dict(expected)}")

    def _gaps(self) -> dict[str, tuple[fx.Node, tuple[int, int]]]:
        """{kernel that was not found: (itself, the places of ops between the kernels around it that were)}."""
        place = {op.name: i for i, op in enumerate(self.ops)}
        placed, kernels = self.plan.by_node, [n for n in self.runs if n.name in self.plan.by_node]
        found: dict[str, tuple[fx.Node, tuple[int, int]]] = {}
        first, open_ = 0, list[fx.Node]()
        for node in [*kernels, None]:
            op = self.found.get(node.name) if node is not None else None
            if node is not None and op is None:
                open_.append(node)
                continue
            end = len(self.ops) if op is None else place[op.name]
            found.update({n.name: (n, (min(first, end), max(first, end) + 1)) for n in open_ if n.name in placed})
            first, open_ = end, []
        return found

    def _unplanned(self) -> None:
        """Ops that a converter adds beside the one of its call have the attributes of that one."""
        of_lost: dict[int, list[dict[str, Any]]] = {}
        for node, (start, end) in self.gaps.values():
            for i in range(start, min(end, len(self.ops))):
                of_lost.setdefault(i, []).append(dict(self.runs[node]))
        own = {op.name for op in self.found.values()}
        named = [i for i, op in enumerate(self.ops) if op.name in own]
        beside: dict[int, list[dict[str, Any]]] = {}
        for before, after in zip([-1, *named], [*named, len(self.ops)], strict=True):
            near = [attributes(self.ops[i]) for i in (before, after) if 0 <= i < len(self.ops)]
            for i in range(before + 1, after):
                beside[i] = near
        for i, near in beside.items():
            op = self.ops[i]
            have = attributes(op)
            if have and op.type != "Cmo" and have not in [*near, *of_lost.get(i, ())]:
                self.wrong.append(f"op {op.name} ({op.type}) has {have}, which the plan does not say")

    def _waits(self) -> None:
        waiting = [op for op in self.ops if op.type == "Identity" and proto.edges(op)[1]]
        carried = Counter((op.name, self._behind(edge.source)) for op in waiting for edge in proto.edges(op)[1])
        for wait in self.plan.waits:
            node, on = self.found.get(wait.node), self._kept(wait.on)
            held = {name for name, source in carried if on is None or source == on.name}
            if not held or (node is not None and not held.intersection(self._inputs(node))):
                self.wrong.append(f"kernel {wait.node} does not wait for {wait.on} in the lowered graph")
        if len(waiting) != len(self.plan.waits):
            self.wrong.append(f"the lowered graph has {len(waiting)} waits, the plan {len(self.plan.waits)}")

    def _prefetches(self) -> None:
        left = [op for op in self.ops if op.type == "Cmo"]
        for fetch in self.plan.prefetches:
            before, after = self.found.get(fetch.before), self._kept(fetch.after)
            match = next((op for op in left if int(op.attr["max_size"].i) == fetch.bytes and proto.edges(op)[1]
                          and (after is None
                               or after.name in {self._behind(e.source) for e in proto.edges(op)[1]})
                          and (before is None or self._memory(op) & set(self._inputs(before)))), None)
            if match is None:
                self.wrong.append(f"the prefetch of {fetch.bytes} bytes of {fetch.weight} after {fetch.after} is not "
                                  "in the lowered graph")
            else:
                left.remove(match)
        self.wrong += [f"op {op.name} is a prefetch that the plan does not have" for op in left]

    def _kept(self, name: str) -> Any:
        """The op of kernel ``name``; None where it was not found, or is a view that torchair may have moved: what waits
        for it then waits for the op that it has been written onto."""
        return None if self.targets.get(name) in MAY_VANISH else self.found.get(name)

    def _behind(self, name: str) -> str:
        """The op that computes what ``name`` renames."""
        op = self.by_name[name]
        while op.type in METADATA and (data := [e for e in proto.edges(op)[0] if e]):
            op = self.by_name[data[0].source]
        return str(op.name)

    def _inputs(self, op: Any) -> Iterator[str]:
        """Names of the ops that feed ``op`` and, where one of `BESIDE` is in between, of those behind it."""
        for edge in proto.edges(op)[0]:
            if edge is None:
                continue
            source = self.by_name[edge.source]
            yield str(source.name)
            if source.type in METADATA | BESIDE:
                yield from self._inputs(source)

    def _memory(self, op: Any) -> set[str]:
        return {e.source for e in proto.edges(op)[0] if e is not None}


def attributes(op: Any) -> dict[str, str]:
    """What the plan has left on a GE op, as texts."""
    found = {key: bytes(op.attr[key].s).decode() for key in TEXTS if key in op.attr}
    if marks.INNER_PARALLEL in op.attr:
        found[marks.INNER_PARALLEL] = str(bool(op.attr[marks.INNER_PARALLEL].b))
    return found


def _pair(graph: fx.Graph, ops: list[Any]) -> dict[str, Any]:
    """{call: its op}, for operators of which the lowered graph has as many calls as the graph. Where a call has become
    several ops, as a sort does whose indices are cast, it is the first of them."""
    lowered: dict[str, list[Any]] = {}
    seen: set[str] = set()
    for op in ops:
        _, _, target = (name := proto.fx_name(op)).partition("-")
        if target and name not in seen:
            lowered.setdefault(target, []).append(op)
        seen.add(name)
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            calls.setdefault(str(node.target), []).append(node)
    return {node.name: op for target, nodes in calls.items() if len(nodes) == len(lowered.get(target, ()))
            for node, op in zip(nodes, lowered[target], strict=True)}
