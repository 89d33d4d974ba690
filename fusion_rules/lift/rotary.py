"""The spellings of rotary embedding  →  cannopy::rotary(x, cos, sin, interleaved).

Interleaved (DeepSeek MLA):  cat(x₀·c − x₁·s, x₁·c + x₀·s) with x₀, x₁ the even and odd elements.
Half split (Llama, V3.2 indexer):  x·cos + cat(−x₂, x₁)·sin with x₁, x₂ the halves, cos = cat(c, c).
Half split of a tensor whose pairs were taken apart before (DeepSeek MLA in transformers before 5.14) is interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Items, Literal, Number, Op, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fusion_rules.lift.halves import half_of, unequal_at
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, where


def _part(x: str, prefix: str) -> Op:
    return op(aten.slice.Tensor, Any(x), Number("dim"), Number(f"{prefix}_start"), Number(f"{prefix}_end"),
              Number("step"))


def _times(a: Op, b: str) -> Op:
    return op(aten.mul.Tensor, a, Any(b), commutative=True)


FIRST, SECOND = _part("x", "first"), _part("x", "second")

DIFFERENCE = op(aten.sub.Tensor, _times(FIRST, "cos"), _times(SECOND, "sin"), name="difference")
PAIRS = op(
    aten.cat.default,
    Items((
        DIFFERENCE,
        op(aten.add.Tensor, _times(SECOND, "cos"), _times(FIRST, "sin"), commutative=True),
    )),
    Number("dim"),
)

BACK = op(
    aten.cat.default,
    Items((
        op(aten.add.Tensor, _times(FIRST, "cos"), _times(SECOND, "sin"), commutative=True),
        op(aten.sub.Tensor, _times(SECOND, "cos"), _times(FIRST, "sin"), name="difference"),
    )),
    Number("dim"),
)
"""The opposite direction: the sine has the other sign."""

TURNED = op(aten.cat.default, Items((op(aten.neg.default, SECOND), FIRST)), Number("dim"))
ROTATE_HALF = op(
    aten.add.Tensor,
    op(aten.mul.Tensor, Any("x"), Any("cos"), commutative=True),
    op(
        aten.mul.Tensor,
        TURNED,
        Any("sin"),
        commutative=True,
    ),
    commutative=True,
)
ROTATE_BACK = op(
    aten.sub.Tensor,
    op(aten.mul.Tensor, Any("x"), Any("cos"), commutative=True),
    op(aten.mul.Tensor, TURNED, Any("sin"), commutative=True),
)
"""The opposite direction: the sine has the other sign."""


def _layout(match: Match) -> str | None:
    """"interleaved", "half" or None, from the slices that form the pairs."""
    size = shape(match["x"])[-1]
    if match["dim"] != len(shape(match["x"])) - 1 or size % 2:
        return None
    parts = tuple(match[k] for k in ("first_start", "first_end", "second_start", "second_end", "step"))
    if parts == (0, size, 1, size, 2):
        return "interleaved"
    if parts == (0, size // 2, size // 2, size, 1):
        return "half"
    return None


def _slices(match: Match) -> str:
    """Which elements the two parts are, as in Python's slices."""
    first, second = (f"[{match[f'{k}_start']}:{match[f'{k}_end']}:{match['step']}]" for k in ("first", "second"))
    return f"{first} and {second} of dim {match['dim']}, {describe(match['x'])}"


def _mirrored(match: Match) -> Refusal | None:
    """x₁·a - x₀·b where x₀·cos - x₁·sin is wanted: the pattern matched with the parts the other way round."""
    size = shape(match["x"])[-1]
    parts = tuple(match[k] for k in ("second_start", "second_end", "first_start", "first_end", "step"))
    if parts not in ((0, size, 1, size, 2), (0, size // 2, size // 2, size, 1)):
        return None
    place: fx.Node = match["difference"]
    text = f"{short(place.target)} with its operands the other way round ({where(place)})"
    return Refusal(f"the pairs are mirrored, not rotated: {text}", place, "order",
                   "x₀·cos - x₁·sin and x₁·cos + x₀·sin, or both with the other sign of sin", text,
                   f"swap the operands of {short(place.target)}")


def check_pairs(match: Match, ctx: Context) -> Refusal | None:
    """The pairs cover the whole last dim and cos and sin have one angle per pair."""
    if _layout(match) is None:
        return _mirrored(match) or Refusal(
            "the rotated pairs are neither even/odd elements nor halves of the last dim", match.anchor, "constant",
            "even and odd elements, or first and second half, of the last dim", _slices(match),
            "rotate the whole last dim; where only part of it is rotated, slice that part off first")
    return broadcasts(match, match["x"], shape(match["x"])[-1] // 2, shape(match["x"]))


def check_rotate_half(match: Match, ctx: Context) -> Refusal | None:
    """Both halves of cos and of sin are provably equal."""
    if _layout(match) != "half":
        return Refusal("the rotated parts are not the two halves of the last dim", match.anchor, "constant",
                       "first and second half of the last dim", _slices(match),
                       "rotate the whole last dim; where only part of it is rotated, slice that part off first")
    refusal = broadcasts(match, match["x"], shape(match["x"])[-1], shape(match["x"]))
    if refusal is not None:
        return refusal
    for name in ("cos", "sin"):
        place = unequal_at(match[name])
        if place is not None:
            found = f"{describe(place)} ({where(place)})"
            return Refusal(f"{name} is not provably made from cat(angles, angles), but from {found}", match[name],
                           "value", f"{name} with equal halves: of cat(angles, angles)", found,
                           f"compute {name} in the method from torch.cat((angles, angles), -1), or rotate by half a "
                           "table")
    return None


def broadcasts(match: Match, x: fx.Node, size: int, result: Sequence[int]) -> Refusal | None:
    """``cos`` and ``sin`` of ``match`` have ``size`` entries, at most the dims of ``x`` and its dtype, and leave the
    anchor the shape ``result``."""
    for name in ("cos", "sin"):
        node = match[name]
        if not isinstance(node, fx.Node) or shape(node)[-1:] != (size,):
            return Refusal(f"{name} does not have {size} entries in its last dim",
                           node if isinstance(node, fx.Node) else match.anchor, "shape",
                           f"{name} [..., {size}]", describe(node), f"give {name} {size} entries per token")
        if len(shape(node)) > len(shape(x)):
            return Refusal(f"{name} has more dims than the rotated tensor", node, "shape",
                           f"{name} of at most {len(shape(x))} dims", str(list(shape(node))),
                           f"squeeze {name} before the rotation")
    if shape(match.anchor) != tuple(result):
        return Refusal("cos broadcasts the rotated tensor to another shape", match.anchor, "shape", str(list(result)),
                       str(list(shape(match.anchor))),
                       "expand the rotated tensor before the rotation, or rotate once per token")
    operands = {"x": x, "cos": match["cos"], "sin": match["sin"]}
    if len({dtype(node) for node in operands.values()}) > 1:
        found = ", ".join(f"{k} {describe(dtype(node))} ({where(node)})" for k, node in operands.items())
        return Refusal(f"the rotation mixes dtypes: {found}", match.anchor, "dtype",
                       "one dtype for the rotated tensor, cos and sin", found,
                       f"cast cos and sin to {describe(dtype(x))} before the rotation")
    return None


def _emit(match: Match, ctx: Context, cos: fx.Node, sin: fx.Node) -> None:
    interleaved = _layout(match) == "interleaved"
    cos, sin = _narrowest(cos), _narrowest(sin)
    ctx.editor.replace(
        match.anchor, ctx.editor.call(torch.ops.cannopy.rotary.default, match["x"], cos, sin, interleaved)
    )


def _narrowest(table: fx.Node) -> fx.Node:
    """The table before it was expanded over heads or requests, which the product broadcasts anyway."""
    while is_call(table, aten.expand.default):
        source = table.args[0]
        assert isinstance(source, fx.Node)
        if len(shape(source)) != len(shape(table)):
            break
        table = source
    return table


def rewrite_pairs(match: Match, ctx: Context) -> None:
    """cos and sin already have one angle per pair."""
    _emit(match, ctx, match["cos"], match["sin"])


def rewrite_back(match: Match, ctx: Context) -> None:
    """As `rewrite_pairs` in the opposite direction."""
    _emit(match, ctx, match["cos"], ctx.editor.call(aten.neg.default, match["sin"]))


def rewrite_rotate_half(match: Match, ctx: Context) -> None:
    """Take the first half of cos and sin."""
    halves = [half_of(ctx, _narrowest(match[k])) for k in ("cos", "sin")]
    cos, sin = halves
    assert cos is not None
    assert sin is not None
    if is_call(match.anchor, aten.sub.Tensor):
        sin = ctx.editor.call(aten.neg.default, sin)
    _emit(match, ctx, cos, sin)


def check_apart(match: Match, ctx: Context) -> Refusal | None:
    """[…, D/2, 2] became [2, D/2]: the even elements are the first half, the odd ones the second."""
    size, pairs = shape(match.anchor), shape(match["pairs"])
    rank = len(size)
    if size[-1] % 2 or pairs != (*size[:-1], size[-1] // 2, 2) or match["dims"] != [*range(rank - 1), rank, rank - 1]:
        return Refusal(f"the rotated tensor is a permutation {match['dims']} of {list(pairs)}, not its pairs apart",
                       match.anchor, "constant", "view(..., D/2, 2).transpose(-1, -2)",
                       f"permute {match['dims']} of {list(pairs)}", "swap the last two dims only")
    return None


def rewrite_apart(match: Match, ctx: Context) -> None:
    """The interleaved form of the op takes the pairs as they are."""
    x = ctx.editor.reshape(match["whole"], shape(match.anchor))
    ctx.editor.replace(
        match.anchor, ctx.editor.call(torch.ops.cannopy.rotary.default, x, match["cos"], match["sin"], True)
    )


APART = op(
    "cannopy::rotary",
    op(aten.reshape.default, op(aten.permute.default, op(aten.reshape.default, Any("whole"), Any(), name="pairs"),
                                Any("dims")), Any()),
    Any("cos"),
    Any("sin"),
    Literal(False),
)

RULES = (
    Rule(
        name="lift_rotary",
        equation="cat(x₀·c - x₁·s, x₁·c + x₀·s)  →  rotary(x, c, s)",
        pattern=PAIRS,
        check=check_pairs,
        rewrite=rewrite_pairs,
        near=6,
        core=DIFFERENCE,
    ),
    Rule(
        name="lift_rotary",
        equation="cat(x₀·c + x₁·s, x₁·c - x₀·s)  →  rotary(x, c, -s)",
        pattern=BACK,
        check=check_pairs,
        rewrite=rewrite_back,
        near=6,
    ),
    Rule(
        name="lift_rotary_half",
        equation="x·cat(c, c) + cat(-x₂, x₁)·cat(s, s)  →  rotary(x, c, s)",
        pattern=ROTATE_HALF,
        check=check_rotate_half,
        rewrite=rewrite_rotate_half,
        near=4,
        core=TURNED,
    ),
    Rule(
        name="lift_rotary_half",
        equation="x·cat(c, c) - cat(-x₂, x₁)·cat(s, s)  →  rotary(x, c, -s)",
        pattern=ROTATE_BACK,
        check=check_rotate_half,
        rewrite=rewrite_rotate_half,
        near=4,
        core=TURNED,
    ),
    Rule(
        name="lift_rotary_apart",
        equation="rotary(pairs of x apart, c, s)  →  rotary(x, c, s, interleaved)",
        pattern=APART,
        check=check_apart,
        rewrite=rewrite_apart,
        near=NEVER,
    ),
)
