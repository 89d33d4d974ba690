"""Device kernels of a final graph, by layer: one per call, without what only renames memory or folds to a constant."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, is_call

RENAMES = (operator.getitem, aten.reshape.default, aten.view.default, aten.copy_.default)
"""No kernel: an output is picked, memory is renamed, or torchair maps the write onto the op's own output."""

MARKS = frozenset({"air::scope_enter", "air::scope_exit", "air::wait_tensor", "npu::npu_prefetch"})
"""What a plan adds to a graph: labels, order and prefetches, no kernels."""


def by_layer(graph: fx.Graph) -> dict[int | None, dict[str, int]]:
    """{layer index, None outside of layers: {operation: number of kernels}} in layer order."""
    constant = folded(graph)
    found: dict[int | None, Counter[str]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node not in constant and not is_call(node, *RENAMES) and not _mark(node):
            layer = node.meta.get("layer")
            found.setdefault(layer, Counter())[_name(node)] += 1
    order = sorted(found, key=lambda layer: (layer is None, layer or 0))
    return {layer: dict(sorted(found[layer].items())) for layer in order}


def folded(graph: fx.Graph) -> set[fx.Node]:
    """Calls that depend on no input of the graph; GE computes them once when it compiles."""
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and all(n in constant or n.op == "get_attr" for n in node.all_input_nodes):
            constant.add(node)
    return constant


def _mark(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in MARKS


def _name(node: fx.Node) -> str:
    name = str(node.target).removesuffix(".default")
    return name.removeprefix("npu.").removeprefix("air.").removesuffix("_functional")
