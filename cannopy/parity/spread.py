"""Picks of a prompt whose tokens are spread over dies: a rank records those of its own, reference runs ask for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cannopy.backend import process_groups, ranks
from cannopy.fusion_rules.parallel import context
from cannopy.fusion_rules.parallel.shards import Part
from cannopy.fx_passes.parallel import Layout
from cannopy.parity.picks import Pick, ReplayError


def of(layout: Layout | None) -> Spread | None:
    """How tokens are spread in the graphs of ``layout``; None where each rank has all of its requests."""
    sizes = layout.parallel if layout else None
    if layout is None or sizes is None or sizes.cp == sizes.sp == 1:
        return None
    return Spread(layout, "cp" if sizes.cp > 1 else "attn_tp")


@dataclass(frozen=True)
class Spread:
    """Tokens over the dies of the group of ``kind``."""

    layout: Layout
    kind: str

    def rows(self, tokens: int, rank: int) -> torch.Tensor:
        """Which of ``tokens`` the ``rank``-th die of the group has, int64, in the order of its rows."""
        size = self.layout.size(self.kind)
        parts = context.segments(tokens, size, rank) if self.kind == context.KIND else [
            Part(rank, size).of(tokens, "tokens")]
        return torch.cat([torch.arange(*part) for part in parts])

    def whole(self, picks: Sequence[Pick], tokens: int) -> list[Pick]:
        """``picks`` of one call of ``tokens`` tokens with the rows of all ranks, which do this together.

        Selections that a rank makes part by part become one. Raises `ReplayError` for rows that are no rank's, and
        `RankError` where a rank does not come.
        """
        own, found = len(self.rows(tokens, self.layout.position(self.kind))), []
        waiting: dict[tuple[Any, ...], list[Pick]] = {}
        for pick in picks:
            if pick.rows == tokens:
                found.append(pick)
                continue
            parts = waiting.setdefault((pick.kind, pick.width, pick.k), [])
            parts.append(pick)
            if sum(part.rows for part in parts) >= own:
                parts.sort(key=lambda part: part.reach)
                indices = torch.cat([part.indices for part in parts])
                found.append(replace(pick, indices=self._joined(indices, tokens, own)))
                parts.clear()
        if any(waiting.values()):
            raise ReplayError(f"picks of {[[p.rows for p in parts] for parts in waiting.values() if parts]} rows are "
                              f"left over; a rank has {own} of {tokens} tokens")
        return found

    def _joined(self, indices: torch.Tensor, tokens: int, own: int) -> torch.Tensor:
        if len(indices) != own:
            raise ReplayError(f"a selection of {len(indices)} rows; a rank has {own} of {tokens} tokens")
        group = process_groups.find(self.layout.group(self.kind).name)
        parts = [torch.empty_like(indices) for _ in range(self.layout.size(self.kind))]
        try:
            torch.distributed.all_gather(parts, indices.contiguous(), group=group)
        except RuntimeError as e:
            raise ranks.lost(group, "the exchange of picks", e) from e
        found = indices.new_empty(tokens, indices.shape[1])
        for rank, part in enumerate(parts):
            found[self.rows(tokens, rank)] = part
        return found
