"""Checks that a graph says what its plan says, by reading the graph back."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Mapping

from torch import fx

from cannopy.fx_passes.graph import is_call
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.emission import marks, scope_runs
from cannopy.stream_scheduler.plan.model import Plan
from cannopy.stream_scheduler.simulator.schedule import MAIN
from cannopy.stream_scheduler.verifier.violation import Violation

Attributes = Mapping[str, Mapping[str, str]]
"""{node: what the scopes around it set}."""

_KINDS = {
    (marks.STREAM, marks.PRIORITY, marks.INNER_PARALLEL): "stream",
    (marks.CUBE, marks.VECTOR): "core limit",
    (marks.SUPER_KERNEL, marks.SUPER_KERNEL_OPTIONS): "SuperKernel",
}


def verify_graph(program: Program, plan: Plan) -> list[Violation]:
    """Where the graph of ``program`` is not what ``plan`` says: forms and balance of scopes, attributes and order of
    every kernel, waits, prefetches, and anything of that kind that the plan does not have."""
    graph = program.gm.graph
    forms = _forms(graph)
    if forms:
        return forms
    try:
        runs = scope_runs(graph)
    except ValueError as error:
        return [Violation("scopes", (), str(error))]
    attributes = {node.name: run.attributes for run in runs for node in run.calls}
    return [*_kernels(graph, plan, attributes), *_waits(graph, plan), *_prefetches(graph, plan, attributes)]


def _forms(graph: fx.Graph) -> list[Violation]:
    """Each scope is one of the forms that torchair reads."""
    found = []
    for node in graph.nodes:
        if not is_call(node, marks.enter()):
            continue
        keys, values = node.args[0], node.args[1]
        if tuple(keys) not in _KINDS or len(keys) != len(values):
            found.append(Violation("scopes", (node.name,), f"{node.name} sets {keys} to {values}; expected one of "
                                   + ", ".join(f"{list(k)} ({kind})" for k, kind in _KINDS.items())))
        elif not all(isinstance(v, str) for v in values):
            found.append(Violation("scopes", (node.name,), f"{node.name} has values {values}; expected texts"))
    return found


def _kernels(graph: fx.Graph, plan: Plan, attributes: Attributes) -> list[Violation]:
    placements = plan.by_node
    order = [n.name for n in graph.nodes if n.name in placements]
    found = []
    wanted = [p.node for p in plan.placements]
    if order != wanted:
        pairs = itertools.zip_longest(order, wanted, fillvalue="nothing")
        i, (have, want) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        found.append(Violation("order of kernels", (have, want),
                               f"kernel {i} of the graph is {have}, of the plan {want}"))
    for name in order:
        expected = marks.of(placements[name], plan)
        if attributes[name] != expected:
            found.append(Violation("attributes", (name,), f"{name} has {attributes[name]}; the plan says {expected}"))
    for node in graph.nodes:
        unplanned = node.name not in placements and node.op == "call_function" and attributes.get(node.name)
        if unplanned and node.target is not operator.getitem and not is_call(node, marks.prefetch()):
            found.append(Violation("attributes", (node.name,), f"{node.name} has {attributes[node.name]}; it is no "
                                                               "kernel of the plan"))
    return found


def _waits(graph: fx.Graph, plan: Plan) -> list[Violation]:
    planned = Counter((wait.node, wait.on) for wait in plan.waits)
    made: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if is_call(node, marks.wait()):
            on = _kernel(node.args[1])
            for user in _behind_waits(node):
                made[user.name, on] += 1
            if not node.users:
                made[node.name, on] += 1
    found = [Violation("waits", pair, f"{pair[0]} should wait for {pair[1]}, and the graph has no such wait")
             for pair in planned - made]
    found += [Violation("waits", pair, f"{pair[0]} waits for {pair[1]}, which the plan does not say")
              for pair in made - planned]
    return found


def _behind_waits(node: fx.Node) -> list[fx.Node]:
    """What reads a wait, where several stand one after the other behind the last of them."""
    return [end for user in node.users for end in (_behind_waits(user) if is_call(user, marks.wait()) else [user])]


def _prefetches(graph: fx.Graph, plan: Plan, attributes: Attributes) -> list[Violation]:
    planned = Counter((f.weight, f.bytes, f.after, f.stream) for f in plan.prefetches)
    made: Counter[tuple[str, int, str, str]] = Counter()
    for node in graph.nodes:
        if is_call(node, marks.prefetch()):
            stream = attributes[node.name].get(marks.STREAM, MAIN)
            made[node.args[0].name, node.args[2], _kernel(node.args[1]), stream] += 1
    found = [Violation("prefetch", (one[2],), f"{one[1]} bytes of {one[0]} should be fetched after {one[2]} in "
                       f"stream {one[3]}, and the graph does not") for one in planned - made]
    found += [Violation("prefetch", (one[2],), f"{one[1]} bytes of {one[0]} are fetched after {one[2]} in stream "
                        f"{one[3]}, which the plan does not say") for one in made - planned]
    return found


def _kernel(value: object) -> str:
    """The kernel whose result ``value`` is."""
    node = value
    while isinstance(node, fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    return node.name if isinstance(node, fx.Node) else ""
