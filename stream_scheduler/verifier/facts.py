"""What a graph says about its kernels besides who reads whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from cannopy.fx_passes import alias, kernels
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.graph_cost.build import FREE


@dataclass(frozen=True)
class Hazard:
    """``reader`` reads the value that ``buffer`` has before ``writer`` writes it in place."""

    reader: str
    writer: str
    buffer: str


@dataclass(frozen=True)
class GraphFacts:
    """``results``: kernels that the outputs of the graph or its copies onto inputs read. ``hazards``: reads of old
    values. ``copied`` {reader: buffer}: reads of the old value of a buffer that gets a copy of another input, which no
    kernel makes and nothing can wait for.
    ``groups`` {collective: name of its group}. ``sizes`` {weight: bytes}. ``written``: inputs that the graph
    writes."""

    results: frozenset[str]
    hazards: tuple[Hazard, ...] = ()
    groups: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    written: frozenset[str] = frozenset()
    copied: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def facts_of(program: Program) -> GraphFacts:
    """The `GraphFacts` of the final graph of ``program``."""
    graph = program.gm.graph
    folded = kernels.folded(graph)

    def is_kernel(node: fx.Node) -> bool:
        return node.op == "call_function" and node not in folded and not is_call(node, *FREE)

    def sources(node: fx.Node) -> Iterator[str]:
        """Kernels whose result ``node`` is, or names a part of."""
        if is_kernel(node):
            yield node.name
        elif node.op == "call_function":
            for one in node.all_input_nodes:
                yield from sources(one)

    copies = [n for n in graph.nodes if is_call(n, aten.copy_.default)]
    output = next(iter(reversed(graph.nodes)))
    results = {name for copy in copies for n in alias.nodes_in(copy.args[1:]) for name in sources(n)}
    results |= {name for n in output.all_input_nodes for name in sources(n)}
    hazards, copied = [], {}
    for copy in copies:
        buffer, readers = copy.args[0], _readers(copy.args[0], is_kernel)
        writers = {name for n in alias.nodes_in(copy.args[1:]) for name in sources(n)}
        for writer in writers:
            hazards += [Hazard(r, writer, buffer.name) for r in readers if r != writer]
        if not writers:
            copied.update(dict.fromkeys(readers, buffer.name))
    sizes = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            sizes[node.name] = value.numel() * value.dtype.itemsize
    groups = {n.name: _group(n) for n in graph.nodes if n.op == "call_function" and _group(n)}
    return GraphFacts(frozenset(results), tuple(hazards), groups, sizes,
                      frozenset(c.args[0].name for c in copies if isinstance(c.args[0], fx.Node)), copied)


def _readers(buffer: fx.Node, is_kernel: object) -> list[str]:
    """Kernels that read ``buffer`` or a view of it, which is its old value in a functional graph."""
    found: list[str] = []
    stack = list(buffer.users)
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or is_call(node, aten.copy_.default) or node.op != "call_function":
            continue
        seen.add(node)
        if is_kernel(node):  # type: ignore[operator]
            found.append(node.name)
        else:
            stack.extend(node.users)
    return sorted(found)


def _group(node: fx.Node) -> str:
    """Name of the communication group of a call: the argument that its schema calls a group; "" without one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    for i, argument in enumerate(target._schema.arguments):
        if argument.name in ("group_name", "group", "group_ep", "tag"):
            value = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
            if isinstance(value, str) and value:
                return value
    return ""
