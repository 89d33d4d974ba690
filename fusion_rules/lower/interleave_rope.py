"""cannopy::rotary(x, cos, sin, interleaved=True)  →  npu_interleave_rope(x, cat(cos, cos), cat(sin, sin)).

The op takes [B, N, S, 64] with tables [B, 1, S, 64]; tokens first ([T, N, 64]) become T sequences of one position. The
op takes pairs of neighbours and gives halves, as the dialect op.
"""

from __future__ import annotations

import torch

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.lower.rotary_layout import Layout, layout, refusal, table
from cannopy.fx_passes.graph import dtype, shape

WANTED = "x [tokens, heads, D] with tables [tokens, 1, D/2], or x [B, N, S, D] with tables [1 or B, 1, S, D/2]"


def _sizes(found: Layout) -> tuple[list[int], list[int]]:
    """Shapes of x and of the tables in the emitted call."""
    batch, heads, positions = found.first or (found.tokens, found.heads, 1)
    return [batch, heads, positions, found.dim], [batch, 1, positions, found.dim]


def check(match: Match, ctx: Context) -> Refusal | None:
    """A layout that the op takes, and its contract."""
    found = layout(match)
    if found is None:
        return refusal(match, WANTED)
    size, table_size = _sizes(found)
    fakes = (ctx.editor.empty(size, dtype(match["x"])), *2 * (ctx.editor.empty(table_size, dtype(match["cos"])),))
    given = {name: match[name] for name in ("x", "cos", "sin")}
    return illegal("npu_interleave_rope", fakes, {}, match.anchor, ctx, given)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op."""
    found = layout(match)
    assert found is not None
    size, table_size = _sizes(found)
    tables = [table(ctx, match[name], found, table_size) for name in ("cos", "sin")]
    x = ctx.editor.reshape(match["x"], size)
    out = ctx.editor.call(torch.ops.npu.npu_interleave_rope.default, x, *tables)
    ctx.editor.replace(match.anchor, ctx.editor.reshape(out, shape(match.anchor)))


RULE = Rule(
    name="interleave_rope",
    equation="rotary(x, cos, sin, interleaved)  →  npu_interleave_rope(x, cat(cos, cos), cat(sin, sin))",
    pattern=op("cannopy::rotary", Any("x"), Any("cos"), Any("sin"), Literal(True)),
    check=check,
    rewrite=rewrite,
    kernel="npu_interleave_rope",
    near=2,
)
