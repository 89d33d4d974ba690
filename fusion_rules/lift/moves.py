"""Reshapes and permutes between two values whose last dim stays whole: the order of the rows, and to do it again.

Also what fp32 copies were made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.rule import Context
from cannopy.fusion_rules.engine.spellings import CAST, before_widening
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

MOVES = (aten.reshape.default, aten.permute.default)


@dataclass(frozen=True)
class Moves:
    """Each permute, or reshape, with the place that the followed dim has behind it."""

    steps: tuple[tuple[fx.Node, int], ...]

    def rows(self, size: Sequence[int]) -> torch.Tensor:
        """The numbers of the rows of a value of ``size`` in the order that they have behind the moves."""
        value = torch.arange(math.prod(size[:-1])).view(*size[:-1], 1)
        for move, at in self.steps:
            if is_call(move, aten.permute.default):
                value = value.permute(cast("list[int]", move.args[1]))
            else:
                value = value.reshape(_resized(move, at, 1))
        return value

    def emit(self, ctx: Context, value: fx.Node, size: Sequence[int]) -> fx.Node:
        """The moves on ``value``, which has the rows of a value of ``size`` and another width."""
        width = shape(value)[-1]
        value = ctx.editor.reshape(value, [*size[:-1], width])
        for move, at in self.steps:
            if is_call(move, aten.permute.default):
                value = ctx.editor.call(aten.permute.default, value, move.args[1])
            else:
                value = ctx.editor.reshape(value, _resized(move, at, width))
        return value


def _resized(move: fx.Node, at: int, width: int) -> list[int]:
    return [width if i == at else n for i, n in enumerate(shape(move))]


def moves_of(node: fx.Node, source: fx.Node) -> Moves | None:
    """The moves between ``source`` and ``node``, None when the last dim does not stay whole and last.

    Everything else in between has one tensor operand and its shape.
    """
    chain: list[fx.Node] = []
    while node is not source:
        chain += [node] if is_call(node, *MOVES) else []
        node = cast(fx.Node, node.args[0])
    size, at = shape(source), len(shape(source)) - 1
    steps = []
    for move in reversed(chain):
        new = shape(move)
        if is_call(move, aten.permute.default):
            at = cast("list[int]", move.args[1]).index(at)
        else:
            places = [i for i, n in enumerate(new) if n == size[at] and math.prod(new[:i]) == math.prod(size[:at])]
            if not places:
                return None
            at = places[-1]
        steps.append((move, at))
        size = new
    return Moves(tuple(steps)) if at == len(size) - 1 else None


def narrowed(node: fx.Node, ctx: Context | None = None) -> fx.Node:
    """``node`` without a cast to fp32 behind its reshapes, permutes and expands.

    Without ``ctx`` nothing is added: the result has the right dtype, but not the shape.
    """
    if is_call(node, *CAST):
        source = cast(fx.Node, node.args[0])
        return before_widening(node, dtype(source)) if dtype(source) in (torch.bfloat16, torch.float16) else node
    if not is_call(node, *MOVES, aten.expand.default):
        return node
    old = cast(fx.Node, node.args[0])
    new = narrowed(old, ctx)
    if new is old:
        return node
    return ctx.editor.call(node.target, new, *node.args[1:]) if ctx is not None else new
