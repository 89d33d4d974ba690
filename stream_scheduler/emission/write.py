"""Writes a plan into the final graph of a program.

Kernels come in the order of the plan. Scopes are labels: torchair copies what is open onto each op that it adds, and
inside the scope of a stream or a core limit it does not fold chains of views. So scopes hold kernels and what picks
their outputs; views stand outside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.emission import marks
from cannopy.stream_scheduler.emission.carriers import Carriers
from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.model import Placement, Plan, PlanError, PlannedPrefetch
from cannopy.stream_scheduler.simulator.schedule import MAIN

PLAN = "plan"
"""Key of `Program.facts`: the plan that is written into the graph."""

RULE = "schedule"
"""``meta["rule"]`` of the nodes that are added."""


def write(program: Program, plan: Plan) -> int:
    """Reorder the graph of ``program`` and add scopes, waits and prefetches, in place.

    Returns the number of nodes added. A plan that changes nothing leaves the graph as it is.
    Raises `PlanError`: a kernel that the graph does not have, one that would run before its input, a wait that
    would delay nothing or that no activation can carry, a prefetch beyond its weight.
    """
    if plan.changes_nothing:
        return 0
    added = _Writer(program, plan).run()
    program.facts[PLAN] = plan
    return added


class _Writer:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.graph = program.gm.graph
        self.plan = plan
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.carriers = Carriers(program)
        self.placed = {p.node for p in plan.placements}
        self.written = {s.name for s in program.inputs if s.mutated}
        self.options = {region.name: region.options for region in plan.regions}
        self.output = next(iter(reversed(self.graph.nodes)))
        self.awaited = {wait.on for wait in plan.waits} | {fetch.after for fetch in plan.prefetches}
        self.done: set[fx.Node] = set()
        self.open: list[marks.Attributes] = []
        self.added = 0
        self._check()

    def run(self) -> int:
        order = list(self.graph.nodes)
        for node in order:
            if node.op in ("placeholder", "get_attr") or node in self.carriers.folded:
                self._move(node)
        waits: dict[str, list[str]] = {}
        for wait in self.plan.waits:
            waits.setdefault(wait.node, []).append(wait.on)
        fetches: dict[str, list[PlannedPrefetch]] = {}
        for fetch in self.plan.prefetches:
            fetches.setdefault(fetch.after, []).append(fetch)
        for placement in self.plan.placements:
            self._kernel(placement, waits.get(placement.node, ()))
            for fetch in fetches.get(placement.node, ()):
                self._prefetch(fetch)
        self._scopes([])
        for node in order:
            if node not in self.done:
                self._move(node)
        return self.added

    def _check(self) -> None:
        for placement in self.plan.placements:
            known("kernel", placement.node, self.nodes)
        for node in self.graph.nodes:
            if is_call(node, marks.enter(), marks.wait()):
                raise PlanError(f"{node.name}: the graph has a plan written into it already")

    def _kernel(self, placement: Placement, waits: Iterable[str]) -> None:
        node = self.nodes[placement.node]
        self._inputs(node)
        for name in waits:
            self._wait(node, name)
        self._scopes(self._wanted(placement))
        self._move(node)
        for user in list(node.users):
            if user.target is operator.getitem:
                self._move(user)

    def _inputs(self, node: fx.Node) -> None:
        """Bring what ``node`` reads and no placement is for, in order; views leave the open scopes."""
        stack = [node]
        while stack:
            here = stack[-1]
            missing = [n for n in here.all_input_nodes if n not in self.done and n is not here]
            if missing:
                blocked = next((n for n in missing if n.name in self.placed), None)
                if blocked is not None:
                    raise PlanError(f"kernel {node.name!r} is placed before {blocked.name!r}, whose result it reads; "
                                    f"place it after {blocked.name!r}")
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if here is not node and here not in self.done:
                if here.target is not operator.getitem:
                    self._scopes([])
                self._move(here)

    def _wanted(self, placement: Placement) -> list[marks.Attributes]:
        wanted = []
        if placement.stream != MAIN:
            wanted.append(marks.stream(placement.stream))
        if placement.cores is not None:
            wanted.append(marks.cores(placement.cores))
        if placement.super_kernel is not None:
            known("SuperKernel region", placement.super_kernel, self.options)
            wanted.append(marks.super_kernel(placement.super_kernel, self.options[placement.super_kernel]))
        return wanted

    def _scopes(self, wanted: list[marks.Attributes]) -> None:
        """Leave and enter scopes until exactly ``wanted`` are open, outermost first."""
        common = 0
        while common < min(len(wanted), len(self.open)) and wanted[common] == self.open[common]:
            common += 1
        while len(self.open) > common:
            self.open.pop()
            self._add(marks.leave(), (), None)
        for attributes in wanted[common:]:
            self.open.append(attributes)
            self._add(marks.enter(), ([k for k, _ in attributes], [v for _, v in attributes]), None)

    def _wait(self, node: fx.Node, name: str) -> None:
        """An input of ``node`` is there only when ``name`` has ended."""
        awaited = self.nodes.get(name)
        if awaited is None or awaited not in self.done:
            raise PlanError(f"kernel {node.name!r} waits for {name!r}, which "
                            + ("the graph does not have" if awaited is None else "is placed behind it"))
        dependency = self._tensor_of(awaited)
        carrier = self._carrier(node)
        self._scopes([])
        value = carrier
        kernel = carrier.args[0] if carrier.target is operator.getitem else carrier
        read_later = any(user not in self.done and user is not node for user in carrier.users)
        if read_later or str(kernel) in self.awaited:
            # After tracing, every later reader of the tensor, other waits among them, would read this wait; a view is
            # another tensor.
            shape = [int(n) for n in carrier.meta["val"].shape]
            value = self._add(aten.view.default, (carrier, shape), carrier.meta["val"], carrier)
        waited = self._add(marks.wait(), (value, dependency), carrier.meta["val"], node)
        node.replace_input_with(carrier, waited)

    def _carrier(self, node: fx.Node) -> fx.Node:
        """The input of ``node`` that is made to wait: one that nobody reads later where there is one."""
        found = self.carriers.of(node)
        if not found:
            raise PlanError(f"kernel {node.name!r} cannot be made to wait: it reads weights and caches only")
        return next((n for n in found if all(u in self.done or u is node for u in n.users)), found[0])

    def _tensor_of(self, node: fx.Node) -> fx.Node:
        """A tensor that is there when ``node`` has ended."""
        if isinstance(node.meta.get("val"), torch.Tensor):
            return node
        picked = next((u for u in node.users if u.target is operator.getitem and u in self.done
                       and isinstance(u.meta.get("val"), torch.Tensor)), None)
        if picked is None:
            raise PlanError(f"kernel {node.name!r} has no result that something else could wait for")
        return picked

    def _prefetch(self, fetch: PlannedPrefetch) -> None:
        known("weight", fetch.weight, self.carriers.loaded)
        weight = self.nodes[fetch.weight]
        size = weight.meta["val"].numel() * weight.meta["val"].dtype.itemsize
        if not 0 < fetch.bytes <= size:
            raise PlanError(f"the prefetch of {fetch.weight!r} has {fetch.bytes} bytes; expected 1 to {size}, its size")
        if fetch.weight in self.written:
            raise PlanError(f"the prefetch of {fetch.weight!r}: the graph writes it")
        dependency = self._tensor_of(self.nodes[fetch.after])
        self._scopes([] if fetch.stream == MAIN else [marks.stream(fetch.stream)])
        self._add(marks.prefetch(), (weight, dependency, fetch.bytes), None, self.nodes[fetch.after])

    def _move(self, node: fx.Node) -> None:
        self.done.add(node)
        if node is not self.output:
            self.output.prepend(node)

    def _add(self, target: Any, args: tuple[Any, ...], value: Any, like: fx.Node | None = None) -> fx.Node:
        with self.graph.inserting_before(self.output):
            node = self.graph.call_function(target, args)
        known_of = like.meta if like is not None else {}
        node.meta.update({k: known_of[k] for k in ("source", "module_path", "layer") if k in known_of})
        node.meta.setdefault("source", "")
        node.meta.update(val=value, rule=RULE)
        self.done.add(node)
        self.added += 1
        return node
