"""cannopy::rotary(x, cos, sin, interleaved=False)  →  npu_rotary_mul(x, cat(cos, cos), cat(sin, sin)).

x is [B, S, N, D] with cos [1 or B, S, 1, D/2] (emitted as one request of T = B * S tokens, [1, T, N, D], because the
op limits B to 999) or [B, N, S, D] with cos [1 or B, 1, S, D/2] (emitted as it is).
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fx_passes.graph import aten, dtype, shape


def _packed(match: Match) -> tuple[list[int], list[int]] | None:
    """Shapes of x and of the tables in the emitted call; None for a layout that is not one of the two above."""
    size, table = shape(match["x"]), shape(match["cos"])
    if len(size) != 4 or len(table) != 4 or table != shape(match["sin"]) or table[0] not in (1, size[0]):
        return None
    batch, second, third, dim = size
    if table[1:] == (second, 1, dim // 2):
        return [1, batch * second, third, dim], [1, batch * second, 1, dim]
    if table[1:] == (1, third, dim // 2):
        return list(size), [table[0], 1, third, dim]
    return None


def check(match: Match, ctx: Context) -> Refusal | None:
    """A layout that the op takes, and its contract."""
    packed = _packed(match)
    if packed is None:
        found = f"x {list(shape(match['x']))}, cos {list(shape(match['cos']))}, sin {list(shape(match['sin']))}"
        return Refusal(f"layout {found} is not one of the op's", match.anchor, "shape",
                       "x [B, S, N, D] with tables [1 or B, S, 1, D/2], or [B, N, S, D] with [1 or B, 1, S, D/2]",
                       found, "rotate tensors of four dims, with one table row for each token")
    fakes = [ctx.editor.empty(size, dtype(match["x"])) for size in (*packed, packed[1])]
    given = {"input": match["x"], "r1": match["cos"], "r2": match["sin"]}
    return illegal("npu_rotary_mul", fakes, {}, match.anchor, ctx, given)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op in its packed layout."""
    packed = _packed(match)
    assert packed is not None
    x_size, table_size = packed
    tables = [_table(ctx, match[name], match, table_size) for name in ("cos", "sin")]
    out = ctx.editor.call(torch.ops.npu.npu_rotary_mul.default, ctx.editor.reshape(match["x"], x_size), *tables)
    ctx.editor.replace(match.anchor, ctx.editor.reshape(out, shape(match.anchor)))


def _table(ctx: Context, half: fx.Node, match: Match, size: list[int]) -> fx.Node:
    whole = doubled(ctx, half)
    batch = shape(match["x"])[0]
    if shape(whole)[0] != batch and size[0] == 1 and batch > 1 and size[1] != 1:
        whole = ctx.editor.call(aten.expand.default, whole, [batch, *shape(whole)[1:]])
    return ctx.editor.reshape(whole, size)


RULE = Rule(
    name="rotary_mul",
    equation="rotary(x, cos, sin)  →  npu_rotary_mul(x, cat(cos, cos), cat(sin, sin))",
    pattern=op("cannopy::rotary", Any("x"), Any("cos"), Any("sin"), Literal(False)),
    check=check,
    rewrite=rewrite,
    kernel="npu_rotary_mul",
    near=2,
)
