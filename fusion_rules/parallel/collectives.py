"""Functional collectives as nodes of a graph: the operator and the wait for it, with the stable name of the group."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives
from torch import fx

from cannopy.fx_passes.graph import Editor, shape
from cannopy.fx_passes.parallel import Group

_ops = torch.ops._c10d_functional


def all_gather(editor: Editor, x: fx.Node, group: Group) -> fx.Node:
    """[n, …] of each rank  →  [size · n, …], the ranks in order."""
    return _waited(editor, _ops.all_gather_into_tensor.default, x, group.size, group.name)


def reduce_scatter(editor: Editor, x: fx.Node, group: Group) -> fx.Node:
    """[size · n, …]  →  the sum over the ranks of rows position · n to position · n + n - 1."""
    return _waited(editor, _ops.reduce_scatter_tensor.default, x, "sum", group.size, group.name)


def all_reduce(editor: Editor, x: fx.Node, group: Group) -> fx.Node:
    """The sum over the ranks."""
    return _waited(editor, _ops.all_reduce.default, x, "sum", group.name)


def all_to_all(editor: Editor, x: fx.Node, group: Group) -> fx.Node:
    """[size · n, …]  →  [size · n, …]: part i goes to rank i of the group, part i of the result comes from it."""
    splits = [shape(x)[0] // group.size] * group.size
    return _waited(editor, _ops.all_to_all_single.default, x, splits, splits, group.name)


def _waited(editor: Editor, target: object, *args: object) -> fx.Node:
    return editor.call(_ops.wait_tensor.default, editor.call(target, *args))
