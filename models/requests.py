"""The part of a serving engine that a step needs: which blocks each request owns, and how long each request is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .paging import slot_mapping
from .serving import PagedCache


class _HasCache(Protocol):
    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache: ...


@dataclass
class Requests:
    """Requests with their blocks, in random order, and their lengths: makes the arguments of `ServingModel`'s methods.

    Args:
        model: a `ServingModel` or a `Draft`; ``cache`` is made by it and on its device.
        requests: how many.
        blocks_each: blocks that each request owns: it may have ``blocks_each · block_size`` tokens.
        block_size: tokens per block.
        seed: of the order of the blocks.
        spare: blocks of the cache that belong to no request, besides block 0.
        dies: how many share the rows of the cache: ``cache`` has room for those of one, two blocks at least.

    ``table`` is the block table, int32 ``[requests, blocks_each]``. ``lengths`` counts each request's tokens in the
    cache; an engine that rejects drafts sets them back, and the next step overwrites the rows behind them.
    """

    model: _HasCache
    requests: int
    blocks_each: int = 4
    block_size: int = 4
    seed: int = 0
    spare: int = 0
    dies: int = 1
    table: Tensor = field(init=False)
    cache: PagedCache = field(init=False)
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.requests * self.blocks_each + self.spare
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed)) + 1
        owned = order[: self.requests * self.blocks_each].int()
        self.table = owned.view(self.requests, self.blocks_each)
        self.cache = self.model.new_cache(max(2, -(-(blocks + 1) // self.dies)), self.block_size)
        self.lengths = [0] * self.requests

    @property
    def device(self) -> torch.device:
        """Where the cache is, and so what the methods return."""
        tensor: Tensor = next(t for t in vars(self.cache.layers[0]).values() if isinstance(t, Tensor))
        return tensor.device

    def advance(self, new: Sequence[int]) -> Tensor:
        """Slots of the next ``new[b]`` tokens of each request, int64, packed; adds ``new`` to ``lengths``.

        Raises:
            ValueError: a request would have more tokens than its blocks hold. Nothing has changed then.
        """
        most = self.blocks_each * self.block_size
        for b, (at, n) in enumerate(zip(self.lengths, new, strict=True)):
            if at + n > most:
                raise ValueError(f"request {b} has {at} tokens and {n} more; its {self.blocks_each} blocks hold {most}")
        positions = [torch.arange(n) + at for n, at in zip(new, self.lengths, strict=True)]
        owner = [torch.full((n,), b) for b, n in enumerate(new)]
        self.lengths = [at + n for n, at in zip(new, self.lengths, strict=True)]
        return slot_mapping(self.table, torch.cat(positions), torch.cat(owner), self.block_size)

    def prefill_inputs(self, prompts: Sequence[Tensor], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ends and slots of one prefill of a prompt per request, with ``padding`` more tokens."""
        counts = [len(p) for p in prompts]
        slots = torch.cat((self.advance(counts), padding_slots(padding, self.block_size)))
        tokens = torch.cat((*prompts, torch.zeros(padding, dtype=torch.long)))
        return tokens.to(self.device), torch.tensor(counts).cumsum(0).to(self.device), slots.to(self.device)

    def decode_inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens ``[requests, queries]`` packed, lengths, block table and slots of one decode step."""
        slots = self.advance([tokens.shape[1]] * self.requests)
        lengths = torch.tensor(self.lengths)
        return tuple(t.to(self.device) for t in (tokens.flatten(), lengths, self.table, slots))  # type: ignore[return-value]


def padding_slots(count: int, block_size: int) -> Tensor:
    """Slots of block 0, which belongs to nobody, int64 ``[count]``; all different where the block is large enough."""
    return torch.arange(count) % block_size
