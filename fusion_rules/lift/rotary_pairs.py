"""stack(x₀·c − x₁·s, x₁·c + x₀·s)  →  the pairs of cannopy::rotary(x, c, s, interleaved) side by side.

x₀ and x₁ are the even and odd elements of the last dim: slices of step 2, or the entries of [..., D/2, 2]. Models write
it so with tables of half the dim, or with complex numbers, which `normalise.complexes` has taken apart into this form.
The op gives all first elements, then all second ones; its result is put back into pairs. Where npu_interleave_rope does
not take pairs of this size or dtype, they are taken apart in front of the op as well.
"""

from __future__ import annotations

import operator
from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Items, Number, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.lift.rotary import broadcasts
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

COS_FIRST = op(aten.mul.Tensor, Any("first"), Any("cos"), commutative=True)
COS_SECOND = op(aten.mul.Tensor, Any("second"), Any("cos"), commutative=True)
SIN_FIRST = op(aten.mul.Tensor, Any("first"), Any("sin"), commutative=True)
SIN_SECOND = op(aten.mul.Tensor, Any("second"), Any("sin"), commutative=True)
DIFFERENCE = op(aten.sub.Tensor, COS_FIRST, SIN_SECOND, name="difference")
PATTERN = op(aten.stack.default, Items((DIFFERENCE, op(aten.add.Tensor, COS_SECOND, SIN_FIRST, commutative=True))),
             Number("dim"))
BACK = op(aten.stack.default, Items((op(aten.add.Tensor, COS_FIRST, SIN_SECOND, commutative=True),
                                     op(aten.sub.Tensor, COS_SECOND, SIN_FIRST, name="difference"))), Number("dim"))
"""The opposite direction: the sine has the other sign."""


def _part(node: object) -> tuple[fx.Node, bool, int] | None:
    """(tensor, whether it is [..., D/2, 2], which of each pair) that ``node`` takes every other element of."""
    given: tuple[Anything, ...] = node.args if isinstance(node, fx.Node) else ()
    if is_call(node, operator.getitem) and is_call(given[0], aten.unbind.int):
        (tensor, *dim), which = given[0].args, given[1]
        last = dim and dim[0] in (-1, len(shape(tensor)) - 1)
        return (tensor, True, which) if last and shape(tensor)[-1] == 2 else None
    if is_call(node, aten.select.int):
        tensor, dim, which = given
        last = dim in (-1, len(shape(tensor)) - 1)
        return (tensor, True, which % 2) if last and shape(tensor)[-1] == 2 else None
    if is_call(node, aten.slice.Tensor):
        tensor, start, size = given[0], given[2], shape(given[0])[-1]
        every_other = size % 2 == 0 and given[1:] == (len(shape(tensor)) - 1, start, size, 2)
        return (tensor, False, start) if start in (0, 1) and every_other else None
    return None


def _rotated(match: Match) -> tuple[fx.Node, bool] | None:
    """(the tensor whose pairs are rotated, whether it is [..., D/2, 2])."""
    first, second = _part(match["first"]), _part(match["second"])
    if first is None or second is None or first[:2] != second[:2] or (first[2], second[2]) != (0, 1):
        return None
    return first[:2]


def check(match: Match, ctx: Context) -> Refusal | None:
    """The pairs are neighbours, stay neighbours, and cos and sin have one angle per pair."""
    found = _rotated(match)
    if found is None:
        parts = f"{describe(match['first'])} and {describe(match['second'])}"
        return Refusal(f"the rotated pairs are no neighbours of one tensor: {parts}", match.anchor, "constant",
                       "even and odd elements of the last dim", parts, "rotate x[..., 0::2] and x[..., 1::2]")
    half = shape(match["first"])
    if match["dim"] not in (-1, len(half)):
        return Refusal(f"the rotated parts are stacked along dim {match['dim']}, not behind the last one", match.anchor,
                       "constant", "dim -1", str(match["dim"]), "stack along dim -1, or concatenate")
    return broadcasts(match, match["first"], half[-1], (*half, 2))


def _emit(match: Match, ctx: Context, sin: fx.Node) -> None:
    """Rotate, then put first and second elements side by side."""
    found = _rotated(match)
    assert found is not None
    half, editor = shape(match["first"]), ctx.editor
    size, order = [*half[:-1], 2 * half[-1]], [*range(len(half) - 1), len(half), len(half) - 1]
    neighbours = _takes_neighbours(ctx, match["first"])
    if neighbours:
        x = editor.reshape(found[0], size) if found[1] else found[0]
    else:
        pairs = found[0] if found[1] else editor.reshape(found[0], [*half, 2])
        x = editor.reshape(editor.call(aten.permute.default, pairs, order), size)
    out = editor.call(torch.ops.cannopy.rotary.default, x, match["cos"], sin, neighbours)
    halves = editor.reshape(out, [*half[:-1], 2, half[-1]])
    editor.replace(match.anchor, editor.call(aten.permute.default, halves, order))


def _takes_neighbours(ctx: Context, part: fx.Node) -> bool:
    """Whether npu_interleave_rope takes the size and dtype of the pairs that ``part`` [..., D/2] is one half of."""
    fakes = [ctx.editor.empty([1, 1, 1, 2 * shape(part)[-1]], dtype(part)) for _ in range(3)]
    return illegal("npu_interleave_rope", fakes, {}, part, ctx) is None


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op and its pairs."""
    _emit(match, ctx, match["sin"])


def rewrite_back(match: Match, ctx: Context) -> None:
    """The same in the opposite direction."""
    _emit(match, ctx, ctx.editor.call(aten.neg.default, match["sin"]))


RULES = (
    Rule(
        name="lift_rotary",
        equation="stack(x₀·c - x₁·s, x₁·c + x₀·s)  →  pairs of rotary(x, c, s, interleaved)",
        pattern=PATTERN,
        check=check,
        rewrite=rewrite,
        near=6,
        core=DIFFERENCE,
    ),
    Rule(
        name="lift_rotary",
        equation="stack(x₀·c + x₁·s, x₁·c - x₀·s)  →  pairs of rotary(x, c, -s, interleaved)",
        pattern=BACK,
        check=check,
        rewrite=rewrite_back,
        near=6,
    ),
)
