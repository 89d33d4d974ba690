"""Checks that a lowered graph carries its plan: attributes on the intended ops, waits and prefetches as edges."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from cannopy.backend.ge_graph import proto
from cannopy.backend.ge_graph.op_types import GRAPH_INPUTS
from cannopy.fx_passes.graph import is_call
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.emission import marks
from cannopy.stream_scheduler.plan.model import Plan, PlannedPrefetch, Wait
from cannopy.stream_scheduler.simulator.schedule import MAIN

MAY_VANISH = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("permute", "transpose", "t", "view", "reshape", "expand", "alias", "clone", "_to_copy", "squeeze",
                 "unsqueeze", "detach", "lift_fresh_copy")
    if hasattr(getattr(torch.ops.aten, name), "default")
) | {torch.ops.aten.transpose.int, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int}
"""Operators of which nothing need be left: torchair writes views onto what they view, tracing drops copies and casts
without effect."""

TEXTS = (marks.STREAM, marks.PRIORITY, marks.CUBE, marks.VECTOR, marks.SUPER_KERNEL, marks.SUPER_KERNEL_OPTIONS)
ORDERED = frozenset({"Cmo", "NetOutput"})
"""Ops that may have control edges without a wait of the plan: prefetches follow one another, the end follows them."""


def check(ge_graph: Any, program: Program, plan: Plan, made: Mapping[str, str]) -> list[str]:
    """What is wrong with ``ge_graph`` (torchair's GraphDef), lowered from the graph of ``program`` into which ``plan``
    was written; empty when nothing is.

    Args:
        made: {GE op: call of the graph that it was made for} (`provenance`); graph inputs and the output are of none.

    Every op of a planned kernel has what the plan gives that kernel, no other op has anything; each wait and each
    prefetch is there between ops of the kernels that the plan names, and there are no others. A kernel has to be there
    unless it is one of `MAY_VANISH`.
    """
    return _Check(ge_graph, program, plan, made).run()


class _Check:
    def __init__(self, ge_graph: Any, program: Program, plan: Plan, made: Mapping[str, str]) -> None:
        self.plan, self.made = plan, made
        self.ops = list(ge_graph.op)
        self.nodes: dict[str, fx.Node] = {n.name: n for n in program.gm.graph.nodes}
        self.waits = [n for n in self.nodes.values() if is_call(n, marks.wait())]
        self.fetches = [n for n in self.nodes.values() if is_call(n, marks.prefetch())]
        self.of: dict[str, list[Any]] = {}
        self.readers: dict[str, set[str]] = {}
        self.data: dict[str, Any] = {op.name: op for op in self.ops if op.type in GRAPH_INPUTS}
        for op in self.ops:
            self.of.setdefault(made.get(op.name, ""), []).append(op)
            for edge in proto.edges(op)[0]:
                if edge is not None:
                    self.readers.setdefault(edge.source, set()).add(made.get(op.name, ""))
        self.wrong: list[str] = []
        self.planned: set[str] = set()

    def run(self) -> list[str]:
        self._attributes()
        for wait in self.plan.waits:
            self._wait(wait)
        for fetch in self.plan.prefetches:
            self._prefetch(fetch)
        self._unplanned()
        return self.wrong

    def _attributes(self) -> None:
        expected = self._expected()
        for op in self.ops:
            call = self.made.get(op.name, "")
            have, wanted = attributes(op), expected.get(call, {})
            if have == wanted:
                continue
            of = f" of kernel {call}" if call in expected else f" ({op.type})"
            self.wrong.append(f"op {op.name}{of} has {have}; the plan says {wanted or 'nothing of it'}")
        for name, wanted in expected.items():
            node = self.nodes[name]
            if wanted and name not in self.of and node.target not in MAY_VANISH:
                self.wrong.append(f"no op of kernel {name} ({node.target}) is in the lowered graph; the plan gives it "
                                  f"{wanted}")

    def _expected(self) -> dict[str, dict[str, str]]:
        """{kernel or prefetch: what its ops have}."""
        found = {p.node: marks.of(p, self.plan) for p in self.plan.placements}
        for fetch in self.plan.prefetches:
            if fetch.stream != MAIN and (node := self._prefetch_call(fetch)) is not None:
                found[node.name] = dict(marks.stream(fetch.stream))
        return found

    def _wait(self, wait: Wait) -> None:
        """An `Identity` made for that wait has a control edge from the one kernel and feeds the other."""
        for node in self.waits:
            if _kernel(node.args[1]) != wait.on or all(end.name != wait.node for end in _ends(node)):
                continue
            held = [op for op in self.of.get(node.name, ()) if op.type == "Identity" and self._follows(op, wait.on)]
            read = {user.name for op in held for user in node.users if user.name in self.readers.get(op.name, ())}
            gone = wait.node not in self.of and self.nodes[wait.node].target in MAY_VANISH
            if held and (read or gone):
                self.planned |= {op.name for op in held}
                return
        self.wrong.append(f"kernel {wait.node} does not wait for {wait.on} in the lowered graph")

    def _follows(self, op: Any, kernel: str) -> bool:
        """Whether ``op`` has a control edge from ``kernel``, or from what it views where nothing else is left of it."""
        node = self.nodes[kernel]
        while node.name not in self.of and node.all_input_nodes:
            node = node.all_input_nodes[0]
        sources = {edge.source for edge in proto.edges(op)[1]}
        return any(one.name in sources for one in self.of.get(node.name, ()))

    def _prefetch_call(self, fetch: PlannedPrefetch) -> fx.Node | None:
        for node in self.fetches:
            weight, after, size = node.args
            if (_kernel(weight), _kernel(after), size) == (fetch.weight, fetch.after, fetch.bytes):
                return node
        return None

    def _prefetch(self, fetch: PlannedPrefetch) -> None:
        node = self._prefetch_call(fetch)
        for op in self.of.get(node.name, ()) if node is not None else ():
            source = next((e.source for e in proto.edges(op)[0] if e is not None), "")
            if (op.type == "Cmo" and int(op.attr["max_size"].i) == fetch.bytes and self._follows(op, fetch.after)
                    and self._is_weight(source, fetch.weight)):
                self.planned.add(op.name)
                return
        self.wrong.append(f"the prefetch of {fetch.bytes} bytes of {fetch.weight} after {fetch.after} is not in the "
                          "lowered graph")

    def _is_weight(self, data: str, weight: str) -> bool:
        """Whether graph input ``data`` is ``weight``: of its shape and dtype, and read for the same calls."""
        node = self.nodes[weight]
        value = node.meta["val"]
        if data not in self.data or proto.declared_input(self.data[data]) != (tuple(value.shape), value.dtype):
            return False
        return set(self._calls(node)) == {call for call in self.readers[data] if not self._fetches(call)}

    def _calls(self, node: fx.Node) -> Iterator[str]:
        """Calls that read ``node``; of those that left no op, what reads them."""
        for user in node.users:
            if user.name in self.of and not self._fetches(user.name):
                yield user.name
            elif user.name not in self.of:
                yield from self._calls(user)

    def _fetches(self, call: str) -> bool:
        return any(node.name == call for node in self.fetches)

    def _unplanned(self) -> None:
        seen: set[str] = set()
        for op in self.ops:
            if op.name in seen:
                self.wrong.append(f"two ops are called {op.name}")
            seen.add(op.name)
            if op.name in self.planned:
                continue
            if op.type == "Cmo":
                self.wrong.append(f"op {op.name} is a prefetch that the plan does not have")
            elif proto.edges(op)[1] and op.type not in ORDERED:
                self.wrong.append(f"op {op.name} waits, which the plan does not say")


def _ends(wait: fx.Node) -> Iterator[fx.Node]:
    """What reads ``wait``; where several stand one after the other, behind the last of them."""
    for user in wait.users:
        if is_call(user, marks.wait()):
            yield from _ends(user)
        else:
            yield user


def _kernel(value: Any) -> str:
    """The kernel whose result ``value`` is."""
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = value.args[0]
    return value.name if isinstance(value, fx.Node) else ""


def attributes(op: Any) -> dict[str, str]:
    """What the plan has left on a GE op, as texts."""
    found = {key: bytes(op.attr[key].s).decode() for key in TEXTS if key in op.attr}
    if marks.INNER_PARALLEL in op.attr:
        found[marks.INNER_PARALLEL] = str(bool(op.attr[marks.INNER_PARALLEL].b))
    return found
