"""A tiny serving engine around the zoo's models: blocks in random order, prompts of different lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cannopy.models.paging import slot_mapping
from cannopy.models.serving import ServingModel


@dataclass
class Engine:
    """Requests with their blocks and lengths. ``lengths`` counts the tokens in the cache."""

    model: ServingModel
    requests: int
    blocks_each: int = 4
    block_size: int = 4
    seed: int = 0
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocks = self.requests * self.blocks_each
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(self.seed)) + 1
        self.table = order.view(self.requests, self.blocks_each)
        self.cache = self.model.new_cache(blocks + 1, self.block_size)
        self.lengths = [0] * self.requests

    def slots(self, new: list[int]) -> Tensor:
        """Slots of the next ``new[b]`` tokens of each request; advances the lengths."""
        positions = [torch.arange(n) + at for n, at in zip(new, self.lengths, strict=True)]
        owner = [torch.full((n,), b) for b, n in enumerate(new)]
        self.lengths = [at + n for n, at in zip(new, self.lengths, strict=True)]
        return slot_mapping(self.table, torch.cat(positions), torch.cat(owner), self.block_size)

    def prefill_inputs(self, prompts: list[Tensor], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, ends and slots of one prefill."""
        counts = [len(p) for p in prompts]
        slots = torch.cat((self.slots(counts), torch.zeros(padding, dtype=torch.long)))
        tokens = torch.cat((*prompts, torch.zeros(padding, dtype=torch.long)))
        return tokens, torch.tensor(counts).cumsum(0), slots

    def decode_inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens ``[requests, queries]`` packed, lengths, block table and slots of one decode step."""
        slots = self.slots([tokens.shape[1]] * self.requests)
        return tokens.flatten(), torch.tensor(self.lengths), self.table, slots
