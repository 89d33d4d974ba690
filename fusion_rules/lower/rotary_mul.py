"""cannopy::rotary(x, cos, sin, interleaved=False)  →  npu_rotary_mul(x, cat(cos, cos), cat(sin, sin)).

Tokens first ([T, N, D], [B, S, N, D]) are emitted as one request of all tokens, [1, T, N, D], because the op limits B
to 999; [B, N, S, D] with cos [1 or B, 1, S, D/2] is emitted as it is.
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
    if found.first is None:
        return [1, found.tokens, found.heads, found.dim], [1, found.tokens, 1, found.dim]
    rows = found.lead[0] if len(found.lead) == 3 else 1
    return [*found.first, found.dim], [rows, 1, found.first[2], found.dim]


def check(match: Match, ctx: Context) -> Refusal | None:
    """A layout that the op takes, and its contract."""
    found = layout(match)
    if found is None:
        return refusal(match, WANTED)
    size, table_size = _sizes(found)
    fakes = [ctx.editor.empty(s, dtype(match["x"])) for s in (size, table_size, table_size)]
    given = {"input": match["x"], "r1": match["cos"], "r2": match["sin"]}
    return illegal("npu_rotary_mul", fakes, {}, match.anchor, ctx, given)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op in its packed layout."""
    found = layout(match)
    assert found is not None
    size, table_size = _sizes(found)
    tables = [table(ctx, match[name], found, table_size) for name in ("cos", "sin")]
    out = ctx.editor.call(torch.ops.npu.npu_rotary_mul.default, ctx.editor.reshape(match["x"], size), *tables)
    ctx.editor.replace(match.anchor, ctx.editor.reshape(out, shape(match.anchor)))


RULE = Rule(
    name="rotary_mul",
    equation="rotary(x, cos, sin)  →  npu_rotary_mul(x, cat(cos, cos), cat(sin, sin))",
    pattern=op("cannopy::rotary", Any("x"), Any("cos"), Any("sin"), Literal(False)),
    check=check,
    rewrite=rewrite,
    kernel="npu_rotary_mul",
    near=2,
)
