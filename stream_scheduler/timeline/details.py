"""What the graph knows about its kernels, for the reader of a timeline."""

from __future__ import annotations

import torch
from torch import fx

from cannopy.stream_scheduler.timeline.run import Details

_LONGEST = 6
"""Tensors of one call that are listed; a grouped matmul has hundreds of weights."""


def details(graph: fx.Graph) -> Details:
    """{node: shapes of its tensors, source line, module, rule} of every call."""
    return {node.name: _of(node) for node in graph.nodes if node.op == "call_function"}


def _of(node: fx.Node) -> dict[str, str]:
    inputs = [text for n in node.all_input_nodes for text in _shapes(n)]
    more = len(inputs) - _LONGEST
    listed = ", ".join(inputs[:_LONGEST]) + (f" and {more} more" if more > 0 else "")
    found = {"op": str(node.target), "shapes": f"{listed} → {', '.join(_shapes(node)[:_LONGEST])}"}
    for key, name in (("module_path", "module"), ("source", "source"), ("rule", "rule")):
        if node.meta.get(key):
            found[name] = str(node.meta[key])
    return found


def _shapes(node: fx.Node) -> list[str]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [f"{str(v.dtype).removeprefix('torch.')}[{', '.join(map(str, v.shape))}]" for v in values
            if isinstance(v, torch.Tensor)]
