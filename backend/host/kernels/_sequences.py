"""The sequences inside packed or paged tensors, as the indexer and sparse attention address them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from ....fusion_rules.contracts import value_error


@dataclass(frozen=True)
class Sequence:
    """One request: query rows ``start:stop`` of the flattened queries, ``length`` keys at flattened rows ``keys``."""

    start: int
    stop: int
    length: int
    keys: torch.Tensor

    @property
    def first_bound(self) -> int:
        """Keys that query row 0 may see under right-down causality: the last query sees all of them."""
        return self.length - (self.stop - self.start) + 1


def sequences(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    query_lengths: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    block_table: torch.Tensor | None,
    layout_query: str,
    layout_key: str,
) -> Iterator[Sequence]:
    """The requests of a call in order; `ContractError` (of `op`) for lengths or blocks outside the tensors.

    TND lengths are running sums, the others are per request; None means full rows. ``keys`` indexes the key tensor
    with its leading dimensions flattened.
    """
    spans = _spans(op, "query-lengths", query, query_lengths, layout_query)
    key_spans = _key_spans(op, key, key_lengths, block_table, layout_key)
    if len(spans) != len(key_spans):
        raise value_error(op, "key-lengths", f"{len(key_spans)} key sequences for {len(spans)} query sequences")
    for (start, stop), keys in zip(spans, key_spans, strict=True):
        yield Sequence(start, stop, keys.numel(), keys)


def _spans(
    op: str, rule: str, tensor: torch.Tensor, lengths: torch.Tensor | None, layout: str
) -> list[tuple[int, int]]:
    """Row range of each request in the flattened tensor."""
    if layout == "TND":
        ends = [0, *(lengths.tolist() if lengths is not None else [tensor.shape[0]])]
        if any(b < a for a, b in pairwise(ends)) or ends[-1] > tensor.shape[0]:
            raise value_error(op, rule, f"{ends[1:]} for {tensor.shape[0]} rows")
        return list(pairwise(ends))
    batch, size = tensor.shape[:2]
    counts = lengths.tolist() if lengths is not None else [size] * batch
    if len(counts) != batch or any(not 0 <= n <= size for n in counts):
        raise value_error(op, rule, f"{counts} for {batch} sequences of {size} rows")
    return [(b * size, b * size + n) for b, n in enumerate(counts)]


def _key_spans(
    op: str, key: torch.Tensor, lengths: torch.Tensor | None, block_table: torch.Tensor | None, layout: str
) -> list[torch.Tensor]:
    if layout != "PA_BSND":
        return [torch.arange(a, b) for a, b in _spans(op, "key-lengths", key, lengths, layout)]
    if block_table is None or lengths is None:
        raise value_error(op, "key-lengths", "paged keys without block_table or key lengths")
    blocks, size = key.shape[:2]
    within = torch.arange(size)
    spans = []
    for row, count in zip(block_table, lengths.tolist(), strict=True):
        if not 0 <= count <= row.numel() * size:
            raise value_error(op, "key-lengths", f"{count} keys for {row.numel()} blocks of {size}")
        used = row[: -(-count // size)].long()
        if bool(((used < 0) | (used >= blocks)).any()):
            raise value_error(op, "block-range", f"{used.tolist()} for {blocks} blocks")
        spans.append((used.unsqueeze(1) * size + within).flatten()[:count])
    return spans
