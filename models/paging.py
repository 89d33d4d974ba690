"""One step of a serving engine: which tokens belong to which request, and where their keys go in the paged cache.

Tokens of all requests are packed in one row of length T. A cache is a tensor ``[blocks, block_size, heads, dim]``;
slot ``s`` is row ``s % block_size`` of block ``s // block_size``. Request ``b`` owns the blocks ``block_table[b]``: its
token at position ``p`` lives in block ``block_table[b, p // block_size]``. Block 0 belongs to nobody: a padding token's
slot lies there, and unused entries of the block table are 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Step(Protocol):
    """What a model asks of the step that it runs."""

    positions: Tensor
    """Position of each token in its request, ``[T]``."""
    mask: Tensor
    """True where a query may look at a key, ``[groups, queries, keys]``."""

    def exchange(self, pages: Tensor, rows: Tensor) -> Tensor:
        """Write this step's rows ``[T, heads, dim]``; returns what queries look at: ``[groups, keys, heads, dim]``."""

    def grouped(self, rows: Tensor) -> Tensor:
        """``[T, …]`` as ``[groups, queries, …]``."""

    def packed(self, rows: Tensor) -> Tensor:
        """The inverse of `grouped`."""

    def answers(self, rows: Tensor) -> Tensor:
        """Those of ``rows`` ``[T, …]`` whose logits are wanted."""


def write_rows(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put ``rows`` ``[T, heads, dim]`` at ``slots`` ``[T]`` of ``pages`` ``[blocks, block_size, heads, dim]``."""
    pages.flatten(0, 1).index_copy_(0, slots, rows)


class Prefill:
    """Whole prompts of different lengths, one behind the other; each token looks at its own prompt up to itself.

    Args:
        tokens: T, the length of the packed row, padding at its end included.
        ends: where each prompt ends in the packed row, ``[requests]`` int, ascending.
        slots: cache slot of each token, ``[T]`` int64.
    """

    def __init__(self, tokens: int, ends: Tensor, slots: Tensor) -> None:
        index = torch.arange(tokens, device=ends.device)
        # Padding forms one more request behind the last, so that it looks at nothing but itself.
        request = (index[:, None] >= ends[None, :]).sum(-1)
        starts = torch.cat((ends.new_zeros(1), ends))
        self.positions = index - starts[request]
        self.mask = ((request[:, None] == request[None, :]) & (index[:, None] >= index[None, :]))[None]
        self.slots = slots
        self.ends = ends

    def exchange(self, pages: Tensor, rows: Tensor) -> Tensor:
        """See `Step.exchange`: prompts start at position 0, so their own rows are all that they look at."""
        write_rows(pages, self.slots, rows)
        return rows[None]

    def grouped(self, rows: Tensor) -> Tensor:
        """``[1, T, …]``: one group, kept apart by the mask."""
        return rows[None]

    def packed(self, rows: Tensor) -> Tensor:
        """``[T, …]`` again."""
        return rows[0]

    def answers(self, rows: Tensor) -> Tensor:
        """The last token of each prompt, ``[requests, …]``."""
        return rows[self.ends - 1]


class Decode:
    """The same few tokens per request: the last accepted one and the drafts behind it.

    Args:
        tokens: T, a multiple of the number of requests.
        lengths: tokens of each request in the cache once this step's are written, ``[requests]`` int.
        block_table: blocks of each request in order, ``[requests, blocks per request]`` int.
        slots: cache slot of each token, ``[T]`` int64.
    """

    def __init__(self, tokens: int, lengths: Tensor, block_table: Tensor, slots: Tensor, block_size: int) -> None:
        requests = lengths.shape[0]
        self.queries = tokens // requests
        ahead = torch.arange(self.queries, device=lengths.device)
        positions = lengths[:, None] - self.queries + ahead
        keys = torch.arange(block_table.shape[1] * block_size, device=lengths.device)
        self.positions = positions.flatten()
        self.mask = keys[None, None, :] <= positions[:, :, None]
        self.block_table = block_table
        self.slots = slots

    def exchange(self, pages: Tensor, rows: Tensor) -> Tensor:
        """See `Step.exchange`: all blocks of each request, those rows included that the mask hides."""
        write_rows(pages, self.slots, rows)
        found: Tensor = pages[self.block_table]
        return found.flatten(1, 2)

    def grouped(self, rows: Tensor) -> Tensor:
        """``[requests, queries, …]``."""
        return rows.view(-1, self.queries, *rows.shape[1:])

    def packed(self, rows: Tensor) -> Tensor:
        """``[T, …]`` again."""
        return rows.flatten(0, 1)

    def answers(self, rows: Tensor) -> Tensor:
        """All tokens: each draft is checked against the logits before it."""
        return rows


def slot_mapping(block_table: Tensor, positions: Tensor, requests: Tensor, block_size: int) -> Tensor:
    """Cache slots of tokens at ``positions`` of ``requests`` (both ``[T]``), int64 ``[T]``."""
    blocks = block_table[requests, positions // block_size].long()
    return blocks * block_size + positions % block_size
