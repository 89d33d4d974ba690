"""Layouts of a rotation: which dims are tokens, that the tables vary with, and which are heads, that share a row.

``packed``: tokens first, heads behind them ([T, N, D], [B, S, N, D], [T, D]); ``heads first``: [B, N, S, D], [N, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fx_passes.graph import shape


@dataclass(frozen=True)
class Layout:
    """``tokens`` and ``heads`` of a packed layout; of the other one batch, heads and positions are in ``first``.

    ``lead``: the dims of the tables before the last one; of a packed layout with the first one written out.
    """

    dim: int
    lead: tuple[int, ...]
    tokens: int = 0
    heads: int = 0
    first: tuple[int, int, int] | None = None


def layout(match: Match) -> Layout | None:
    """The layout of ``x`` with the tables ``cos`` and ``sin`` (halves of the last dim); None for another one."""
    size = shape(match["x"])
    table, other = (_broadcast(shape(match[name]), len(size)) for name in ("cos", "sin"))
    if len(size) != len(table) or table != other or 2 * table[-1] != size[-1]:
        return None
    x, t = size[:-1], table[:-1]
    if any(b not in (1, a) for a, b in zip(x, t, strict=True)):
        return None
    last = max((i for i, b in enumerate(t) if b > 1), default=0)
    if all(t[i] == x[i] for i in range(1, last + 1)):
        lead = (x[0], *t[1:])
        return Layout(size[-1], lead, math.prod(x[: last + 1]), math.prod(x[last + 1 :]))
    if len(x) in (2, 3) and t[-2] == 1 and t[-1] == x[-1]:
        batch = x[0] if len(x) == 3 else 1
        return Layout(size[-1], t, first=(batch, x[-2], x[-1]))
    return None


def _broadcast(size: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``size`` with the leading dims of size 1 that broadcasting adds."""
    return (1,) * (rank - len(size)) + size


def refusal(match: Match, wanted: str) -> Refusal:
    """Another layout than ``wanted``."""
    found = f"x {list(shape(match['x']))}, cos {list(shape(match['cos']))}, sin {list(shape(match['sin']))}"
    return Refusal(f"layout {found} is not one of the op's", match.anchor, "shape", wanted, found,
                   "rotate tensors whose first dims are tokens, or [B, N, S, D], with one table row for each token")


def table(ctx: Context, half: fx.Node, found: Layout, size: Sequence[int]) -> fx.Node:
    """``half`` twice, as a table of shape ``size``."""
    whole = doubled(ctx, half)
    if found.first is None:
        whole = ctx.editor.reshape(whole, _broadcast(shape(whole), len(found.lead) + 1))
        return ctx.editor.reshape(ctx.editor.expand(whole, (*found.lead, found.dim)), list(size))
    return ctx.editor.expand(ctx.editor.reshape(whole, [math.prod(found.lead[:-2]), *size[1:]]), list(size))
