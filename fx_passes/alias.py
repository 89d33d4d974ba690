"""Which values of a graph share memory with an input, and which calls write to their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from cannopy.fx_passes.graph import aten

MAY_VIEW = frozenset({aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.flatten.using_ints})
"""Composite operations that return a view when they can, which their schema does not say."""


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The nodes in a nested argument."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    yield from found


def is_view(node: fx.Node) -> bool:
    """Whether the result of ``node`` may share memory with its first argument."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target in MAY_VIEW:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def base(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` may share, through any number of views; itself when it is no view."""
    while is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def mutates(node: fx.Node) -> bool:
    """Whether the schema of the call says that it writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def fake_mode_of(node: fx.Node) -> AbstractContextManager[Any]:
    """The fake mode of the values around ``node``; no mode when none of them is fake."""
    values = [n.meta.get("val") for n in (*node.all_input_nodes, node)]
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
    return detect_fake_mode([v for v in flat if isinstance(v, torch.Tensor)]) or nullcontext()
