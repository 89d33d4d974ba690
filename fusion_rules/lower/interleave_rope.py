"""cannopy::rotary(x, cos, sin, interleaved=True)  →  npu_interleave_rope(x, cat(cos, cos), cat(sin, sin)).

x is [B, N, S, 64] with cos [1 or B, 1, S, 32]. The op takes pairs of neighbours and gives halves, as the dialect op.
"""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fx_passes.graph import dtype, shape


def _table_size(match: Match) -> list[int] | None:
    """Shape of the tables in the emitted call; None for a layout that the op does not take."""
    size, table = shape(match["x"]), shape(match["cos"])
    if len(size) != 4 or table != shape(match["sin"]) or table[1:] != (1, size[2], size[3] // 2):
        return None
    return [size[0], 1, size[2], size[3]] if table[0] in (1, size[0]) else None


def check(match: Match, ctx: Context) -> Refusal | None:
    """A layout that the op takes, and its contract."""
    size = _table_size(match)
    if size is None:
        found = f"x {list(shape(match['x']))}, cos {list(shape(match['cos']))}, sin {list(shape(match['sin']))}"
        return Refusal(f"layout {found} is not [B, N, S, D] with [1 or B, 1, S, D/2]", match.anchor, "shape",
                       "x [B, N, S, D] with tables [1 or B, 1, S, D/2]", found,
                       "move the heads before the tokens (transpose(1, 2)) and rotate after that")
    with ctx.editor.fake_mode:
        table = torch.empty(size, dtype=dtype(match["cos"]))
    given = {name: match[name] for name in ("x", "cos", "sin")}
    return illegal("npu_interleave_rope", (match["x"].meta["val"], table, table), {}, match.anchor, ctx, given)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op."""
    size = _table_size(match)
    assert size is not None
    tables = [_table(ctx, match[name], size) for name in ("cos", "sin")]
    ctx.editor.replace(match.anchor, ctx.editor.call(torch.ops.npu.npu_interleave_rope.default, match["x"], *tables))


def _table(ctx: Context, half: fx.Node, size: list[int]) -> fx.Node:
    return ctx.editor.expand(doubled(ctx, half), size)


RULE = Rule(
    name="interleave_rope",
    equation="rotary(x, cos, sin, interleaved)  →  npu_interleave_rope(x, cat(cos, cos), cat(sin, sin))",
    pattern=op("cannopy::rotary", Any("x"), Any("cos"), Any("sin"), Literal(True)),
    check=check,
    rewrite=rewrite,
    kernel="npu_interleave_rope",
    near=2,
)
