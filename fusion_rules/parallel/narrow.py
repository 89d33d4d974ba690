"""Values with only a part of one dimension, computed again from parts of the weights that they are made of.

A part goes up through operations that keep the dimension apart (each entry of the result is made of the same entry of
the operands) to the projections that make it, which then read rows of their weights. What does not keep it apart, and
what anything else reads in full, is a `ParallelError`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.places import SWIGLU, operands, pointwise
from cannopy.fusion_rules.parallel.shards import Piece, take
from cannopy.fusion_rules.parallel.tokens import Rows, error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, is_call, operator_named, shape
from cannopy.fx_passes.weight_plan import why_not_weight

Pieces = tuple[Piece, ...]
Handler = Callable[["Narrow", fx.Node, int, Pieces], fx.Node]
"""``handler(narrow, node, dim, pieces)`` emits ``node`` with only ``pieces`` of dimension ``dim``."""


class Narrow:
    """Makes parts for the cut of ``kind``. ``rows`` are the tokens that the projections read: more than ``node`` has
    where they are gathered first. ``extra`` are handlers of further operators by target. ``seen``: all that was cut."""

    def __init__(self, work: Work, kind: str, rows: Rows | None = None,
                 extra: Mapping[Any, Handler] | None = None) -> None:
        self.work, self.editor, self.kind, self.rows = work, work.editor, kind, rows
        self.handlers: dict[Any, Handler] = {**_handlers(), **(extra or {})}
        self._made: dict[tuple[fx.Node, int, Pieces], fx.Node] = {}
        self.seen: set[fx.Node] = set()

    def of(self, node: fx.Node, dim: int, pieces: Sequence[Piece]) -> fx.Node:
        """``node`` with only ``pieces`` of dimension ``dim``, in that order."""
        key = node, dim % len(shape(node)), tuple(pieces)
        if key not in self._made:
            if node.op == "placeholder":
                self._made[key] = self.handlers["placeholder"](self, node, key[1], key[2])
            else:
                handler = self.handlers.get(node.target, elementwise if pointwise(node) else _unknown)
                with self.editor.before(node):
                    self._made[key] = handler(self, node, key[1], key[2])
                self.seen.add(node)
        return self._made[key]

    def cuts(self) -> Iterator[tuple[fx.Node, int, Pieces]]:
        """What was made so far: node, dimension and pieces."""
        yield from self._made

    def weight(self, node: fx.Node, dim: int, pieces: Sequence[Piece]) -> fx.Node:
        """Pieces of a weight, also of a transposed one."""
        if is_call(node, aten.permute.default) and node.args[1] == [1, 0]:
            part = self.weight(cast(fx.Node, node.args[0]), 1 - dim, pieces)
            return self.editor.call(aten.permute.default, part, [1, 0])
        reason = why_not_weight(self.work.program, node)
        if reason is not None:
            raise self.error(node, f"only parameters can be cut, and {reason}")
        return take(self.work.program, self.editor, node, dim, pieces)

    def wide(self, x: fx.Node, reader: fx.Node) -> fx.Node:
        """The input of a projection with the rows of all ranks that share it."""
        return x if self.rows is None else self.rows.all(x, reader)

    @property
    def factor(self) -> int:
        """How many times as many rows the parts have."""
        return 1 if self.rows is None else self.rows.factor

    def check(self, *consumers: fx.Node) -> None:
        """`ParallelError` where a value that was cut is read by more than ``consumers``: it would be left whole."""
        for node in self.seen:
            for user in node.users:
                if user not in self.seen and user not in consumers:
                    raise self.error(node, f"{user.name} reads all of {node.name}, which is spread over dies")

    def error(self, node: fx.Node, text: str) -> Exception:
        """The error of this cut at ``node``."""
        return error(self.work.layout, self.kind, node, text)


def total(pieces: Sequence[Piece]) -> int:
    """Entries in ``pieces``."""
    return sum(stop - start for start, stop in pieces)


def _unknown(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    raise narrow.error(node, f"{node.target} is not known to keep the entries of dimension {dim} apart")


def _linear(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    x, weight, bias = operands(node)
    if dim != len(shape(node)) - 1:
        return _unknown(narrow, node, dim, pieces)
    parts = [narrow.wide(x, node), narrow.weight(weight, 0, pieces)]
    if bias is not None:
        parts.append(narrow.weight(bias, 0, pieces))
    return narrow.editor.call(aten.linear.default, *parts)


def _swiglu(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    x = cast(fx.Node, node.args[0])
    at = cast(int, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % len(shape(x))
    if at == dim:
        half = shape(node)[dim]
        pieces = (*pieces, *((half + a, half + b) for a, b in pieces))
    return narrow.editor.call(node.target, narrow.of(x, dim, pieces), *node.args[1:], **node.kwargs)


def elementwise(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """An operation on operands that are broadcast to each other along ``dim``."""
    size, behind = shape(node)[dim], len(shape(node)) - dim

    def part(x: fx.Node) -> fx.Node:
        if len(shape(x)) >= behind and shape(x)[-behind] == size:
            return narrow.of(x, len(shape(x)) - behind, pieces)
        if narrow.factor > 1 and math.prod(shape(x)[: len(shape(x)) - behind]) > 1:
            raise narrow.error(node, f"{x.name} has a value per token of this rank, the product those of all ranks")
        return x

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), part)
    return narrow.editor.call(node.target, *args, **kwargs)


def reshaped(old: Sequence[int], new: Sequence[int], dim: int, pieces: Pieces) -> tuple[int, Pieces] | None:
    """Where ``pieces`` of ``dim`` of a value of sizes ``old`` stand once it has ``new``; None where they are no parts
    of one dimension."""
    period, inner = math.prod(old[dim:]), math.prod(old[dim + 1 :])
    for at in sorted(range(len(new)), key=lambda d: -new[d]):
        block = math.prod(new[at + 1 :])
        if math.prod(new[at:]) == period and all(edge * inner % block == 0 for piece in pieces for edge in piece):
            return at, tuple((a * inner // block, b * inner // block) for a, b in pieces)
    return None


def _reshape(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    x, new = cast(fx.Node, node.args[0]), list(shape(node))
    old = shape(x)
    found = reshaped(new, old, dim, pieces)
    if found is None:
        raise narrow.error(node, f"the parts of dimension {dim} of {list(new)} are no whole parts of {list(old)}")
    part = narrow.of(x, *found)
    new[dim] = total(pieces)
    if dim == 0 and narrow.factor > 1:
        return _unknown(narrow, node, dim, pieces)
    new[0] *= narrow.factor
    return narrow.editor.call(aten.reshape.default, part, new)


def _permute(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    x, dims = cast("tuple[fx.Node, list[int]]", node.args)
    return narrow.editor.call(node.target, narrow.of(x, dims[dim], pieces), dims)


def _slice(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    given: tuple[Any, ...] = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
    x, at, start, stop, step = given
    if at % len(shape(x)) != dim:
        if at % len(shape(x)) == 0 and narrow.factor > 1:
            return _unknown(narrow, node, dim, pieces)
        return narrow.editor.call(node.target, narrow.of(x, dim, pieces), at, start, stop, step)
    if step != 1:
        return _unknown(narrow, node, dim, pieces)
    begin = (start or 0) % shape(x)[dim]
    return narrow.of(x, dim, [(begin + a, begin + b) for a, b in pieces])


def _cat(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    parts, at = (*cast("tuple[Any, ...]", node.args), 0)[:2]
    if at % len(shape(node)) == dim:
        return _unknown(narrow, node, dim, pieces)
    return narrow.editor.call(node.target, [narrow.of(x, dim, pieces) for x in parts], at)


def _stack(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    parts, at = (*cast("tuple[Any, ...]", node.args), 0)[:2]
    along = at % len(shape(node))
    if along == dim or (along == 0 and narrow.factor > 1):
        return _unknown(narrow, node, dim, pieces)
    inner = dim - (along < dim)
    return narrow.editor.call(node.target, [narrow.of(x, inner, pieces) for x in parts], at)


def _same(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    part = narrow.of(cast(fx.Node, node.args[0]), dim, pieces)
    return narrow.editor.call(node.target, part, *node.args[1:], **node.kwargs)


def _item(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """An output of an operator with several: the handler of that operator gets the node that picks it."""
    source = cast(fx.Node, node.args[0])
    handler = narrow.handlers.get(source.target, _unknown)
    narrow.seen.add(source)
    return handler(narrow, node, dim, pieces)


def _handlers() -> dict[Any, Handler]:
    found: dict[Any, Handler] = {
        "placeholder": Narrow.weight,
        aten.linear.default: _linear, aten.reshape.default: _reshape, aten.view.default: _reshape,
        aten.permute.default: _permute, aten.slice.Tensor: _slice, aten.cat.default: _cat,
        aten.stack.default: _stack, aten._to_copy.default: _same, aten.clone.default: _same, operator.getitem: _item,
    }
    swiglu = operator_named(SWIGLU)
    return found if swiglu is None else {**found, swiglu: _swiglu}
