"""Shapes, bytes and arguments of a node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Call:
    """``kernel`` at ``sizes``. ``cube_only``: it leaves an int32 result and takes no vector cores. ``known``: the
    operation is mapped; otherwise it is priced by its bytes."""

    kernel: str
    sizes: dict[str, float] = field(default_factory=dict)
    cube_only: bool = False
    known: bool = True


def shape(value: Any) -> tuple[int, ...]:
    """Shape of a node, or of the first tensor of a node with several results or of a list of nodes."""
    if isinstance(value, (list, tuple)):
        return shape(next(v for v in value if v is not None))
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(found, (list, tuple)):
        found = next(t for t in found if t is not None)
    return tuple(int(d) for d in found.shape)


def numel(value: Any) -> float:
    """Elements, at least 1."""
    return float(max(1, math.prod(shape(value))))


def itemsize(value: Any) -> float:
    """Bytes per element."""
    if isinstance(value, (list, tuple)):
        return itemsize(next(v for v in value if v is not None))
    found = value.meta["val"]
    if isinstance(found, (list, tuple)):
        found = next(t for t in found if t is not None)
    return float(found.dtype.itemsize)


def rows(value: Any) -> float:
    """Elements per last dimension, at least 1."""
    return numel(value) / width(value)


def width(value: Any) -> float:
    """The last dimension, at least 1."""
    found = shape(value)
    return float(max(1, found[-1])) if found else 1.0


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument by position or name."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def number(node: fx.Node, name: str, default: float) -> float:
    """A keyword argument that is a number."""
    found: Any = node.kwargs.get(name, default)
    return float(found or 0)


def tensor_bytes(node: fx.Node) -> float:
    """Bytes that a node reads and writes when it touches each tensor once."""
    total = 0.0
    for value in (node, *node.all_input_nodes):
        found = value.meta.get("val")
        tensors = found if isinstance(found, (list, tuple)) else [found]
        total += sum(float(t.numel() * t.dtype.itemsize) for t in tensors if isinstance(t, torch.Tensor))
    return max(total, 1.0)
