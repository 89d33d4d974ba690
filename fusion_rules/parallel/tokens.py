"""Rows of tokens that ranks have: gathered for a cut matrix, summed and given back behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.contracts import check_call
from cannopy.fusion_rules.parallel.collectives import all_gather, all_reduce, reduce_scatter
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, shape, where
from cannopy.fx_passes.parallel import Layout, ParallelError


def error(layout: Layout, kind: str, node: fx.Node, text: str) -> ParallelError:
    """The error that a cut of ``kind`` meets at ``node``."""
    return ParallelError(f"{kind}={layout.size(kind)}: {text} (node {node.name}, {where(node)})")


def replicated(layout: Layout, kind: str) -> bool:
    """Whether all ranks of a group of ``kind`` have the same tokens: they are in one group of attn_tp or kvp.

    Raises `ParallelError` where some of them have and others have not.
    """
    name, size = layout.parallel.sharing, layout.size(kind)
    same = layout.size(name)
    if same > 1 and same % size:
        raise ParallelError(f"{kind}={size} does not fit {name}={same}: ranks have the same tokens within a group of "
                            f"{name} only, and {same} / {size} is no whole number; take a divisor of {same}")
    return same > 1


def legal(work: Work, kind: str, node: fx.Node) -> None:
    """`ParallelError` where the contract of the operator that ``node`` calls forbids it on the product."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    name = cast(Any, node.target)._schema.name.partition("::")[2]
    broken = check_call(name, args, kwargs, product=work.target)
    if broken:
        raise error(work.layout, kind, node, f"the part is not legal on {work.target}: {'; '.join(map(str, broken))}")


class Rows:
    """The tokens of one kind of group: each rank has rows of its own, unless all have the same ones."""

    def __init__(self, work: Work, kind: str, own: bool = False) -> None:
        """``own``: each rank has rows of its own for certain (`Work.own`)."""
        self.work, self.editor, self.group = work, work.editor, work.layout.group(kind)
        self.same = not own and replicated(work.layout, kind)
        self._gathered: dict[fx.Node, fx.Node] = {}

    @property
    def factor(self) -> int:
        """How many times as many rows `all` has."""
        return 1 if self.same else self.group.size

    def all(self, x: fx.Node, reader: fx.Node) -> fx.Node:
        """[n, …]  →  the rows of all ranks of the group, those of the first rank first; gathered once per ``x``, for
        ``reader`` first."""
        if self.same:
            return x
        if x not in self._gathered:
            with self.editor.before(after(x), like=reader):
                self._gathered[x] = self._of_whole(x) or all_gather(self.editor, x, self.group)
        return self._gathered[x]

    def _of_whole(self, x: fx.Node) -> fx.Node | None:
        """What gathering ``x`` gives, out of a value that all ranks of the group have; None where they have not."""
        whole, sharing = self.work.whole.get(x), self.work.layout.group(self.work.layout.parallel.sharing)
        if whole is None or not set(self.group.ranks) <= set(sharing.ranks):
            return None
        dim = next(d for d, (a, b) in enumerate(zip(shape(x), shape(whole), strict=True)) if a != b)
        each, first = shape(x)[dim], self.group.first - sharing.first
        rows = self.editor.call(aten.slice.Tensor, whole, dim, first * each, (first + self.group.size) * each)
        return self.editor.reshape(rows, [shape(x)[0] * self.group.size, *shape(x)[1:]])

    def summed(self, y: fx.Node, bias: Any = None) -> fx.Node:
        """Partial sums for the rows of `all`  →  the sum for this rank's own, with ``bias`` added once."""
        total = all_reduce(self.editor, y, self.group) if self.same else reduce_scatter(self.editor, y, self.group)
        return total if bias is None else self.editor.call(aten.add.Tensor, total, bias)


def rows_at(work: Work, kind: str) -> Callable[[fx.Node], Rows]:
    """The `Rows` of a group of ``kind`` by a node that has them."""
    @functools.cache
    def rows(own: bool) -> Rows:
        return Rows(work, kind, own)

    return lambda node: rows(node in work.own)


def after(node: fx.Node) -> fx.Node:
    """The first node behind ``node`` that new nodes may stand before: no placeholder."""
    found = node.next
    while found.op == "placeholder":
        found = found.next
    return found
