"""Inputs of the two phases of text generation for the zoo's serving models: packed tokens and a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.parts import experts_one_by_one
from ..models.requests import Requests
from ..models.serving import ServingModel, like
from .errors import ModelSourceError
from .generation import Call, Phase

ALIGNMENT = 16
"""The packed row of a prefill has a multiple of so many tokens, and at least one of padding."""
SPARE_BLOCKS = 2
"""Blocks of a case's cache that belong to none of its requests, besides block 0."""


@dataclass(frozen=True)
class CachePart:
    """The rows of a paged cache that a die has: those of slots that are ``rank`` modulo ``size``, the first one first.

    Of caches [blocks, block size, heads, …] with several heads it has part ``group`` of ``groups`` equal ones, or the
    one head that it shares with others. The default has all of them. Block 0 is that of no request on every die.
    """

    size: int = 1
    rank: int = 0
    groups: int = 1
    group: int = 0

    def has(self, slots: Tensor) -> Tensor:
        """Bool [tokens]: which of ``slots`` [tokens] are on this die."""
        return slots % self.size == self.rank

    def rows(self, slots: Tensor) -> Tensor:
        """Where they stand in the memory of this die's cache."""
        return slots // self.size

    def of(self, whole: Tensor) -> Tensor:
        """This die's rows of a whole cache [blocks, block size, …]: a view [rows, …]."""
        return self.heads(whole.flatten(0, 1))[self.rank :: self.size]

    def heads(self, rows: Tensor) -> Tensor:
        """This die's heads of rows [rows, …] of a whole cache: a view."""
        if rows.dim() < 3 or self.groups == 1:
            return rows
        first, end = (i * rows.shape[1] // self.groups for i in (self.group, self.group + 1))
        return rows[:, first : max(end, first + 1)]


WHOLE = CachePart()


@dataclass(frozen=True)
class ServingCase:
    """A serving model with a number of requests and their longest prompt, all lengths in tokens.

    Request 0 has a prompt of ``prefill_tokens``, the others shorter ones that end on different sides of a block's end.
    A decode step reads ``1 + next_n`` tokens per request. ``max_cache_len`` is what each request's blocks hold at
    least. ``seed`` chooses token ids, prompt lengths and the order of blocks. The packed row of a prefill has
    ``least_packed`` tokens at least: ranks that compute together have rows of one length. The cache has the rows of
    ``part``, and all heads: `cannopy.Compiled.of_rank` cuts them. The methods are ``prefill`` and ``decode``.
    """

    model: ServingModel
    batch: int = 1
    prefill_tokens: int = 96
    max_cache_len: int = 256
    seed: int = 0
    next_n: int = 0
    block_size: int = 128
    least_packed: int = 0
    part: CachePart = WHOLE

    def __post_init__(self) -> None:
        if self.block_size % 16 or self.block_size < 1:
            raise ModelSourceError(f"a block has a multiple of 16 tokens, not {self.block_size}")
        if self.prefill_tokens < 1 or self.prefill_tokens + 1 + self.next_n > self.max_cache_len:
            raise ModelSourceError(
                f"a prompt of {self.prefill_tokens} tokens and a step of {1 + self.next_n} need a cache of at least "
                f"{self.prefill_tokens + 1 + self.next_n} tokens per request, not {self.max_cache_len}"
            )

    @property
    def cache_heads(self) -> int:
        """Heads that the model's caches hold; 1 where all heads read the same rows."""
        pages = vars(self.model.new_cache(1, ALIGNMENT).layers[0]).values()
        return max(t.shape[2] if t.dim() == 4 else 1 for t in pages if isinstance(t, Tensor))

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt: the longest, then one less than, just, and one more than whole blocks, as they fit."""
        longest = self.prefill_tokens
        edges = [n for k in range(longest // self.block_size, 0, -1)
                 for n in (k * self.block_size + d for d in (-1, 0, 1)) if n < longest]
        generator = torch.Generator().manual_seed(self.seed)
        rest = torch.randint(1, longest + 1, (self.batch,), generator=generator).tolist()
        return [longest, *edges, *rest][: self.batch]

    @property
    def capacity(self) -> int:
        """Tokens that the blocks of one request hold."""
        return -(-self.max_cache_len // self.block_size) * self.block_size

    @property
    def packed_tokens(self) -> int:
        """Tokens of the packed row of a prefill, padding included."""
        return max((sum(self.prompt_lengths) // ALIGNMENT + 1) * ALIGNMENT, self.least_packed)

    def ids(self, phase: Phase, step: int = 0) -> Tensor:
        """Token ids, int64 on the CPU: all prompts packed, or those of decode step ``step``, [batch, 1 + next_n]."""
        generator = torch.Generator().manual_seed((self.seed << 16) + (0 if phase == "prefill" else 1 + step))
        shape = (sum(self.prompt_lengths),) if phase == "prefill" else (self.batch, 1 + self.next_n)
        return torch.randint(0, like(self.model).shape[0], shape, generator=generator)

    def prompts(self) -> list[Tensor]:
        """The token ids of each prompt."""
        return list(self.ids("prefill").split(self.prompt_lengths))

    def new_requests(self) -> Requests:
        """Requests without a token, with an empty cache."""
        blocks = self.capacity // self.block_size
        return Requests(self.model, self.batch, blocks, self.block_size, self.seed, SPARE_BLOCKS,
                        self.part.size)

    def prefill(self, requests: Requests) -> Call:
        """The call that reads all prompts."""
        padding = self.packed_tokens - sum(self.prompt_lengths)
        return (*requests.prefill_inputs(self.prompts(), padding), requests.cache), {}

    def decode(self, tokens: Tensor, requests: Requests) -> Call:
        """The call that reads ``tokens`` [batch, 1 + next_n] behind what each request has."""
        return (*requests.decode_inputs(tokens), requests.cache), {}

    def inputs(self, phase: Phase) -> Call:
        """The call of ``phase`` with a new cache; a decode step stands behind prompts that the cache does not hold."""
        requests = self.new_requests()
        if phase == "prefill":
            return self.prefill(requests)
        requests.lengths = self.prompt_lengths
        return self.decode(self.ids("decode"), requests)

    def filled(self, phase: Phase) -> Call:
        """As `inputs`, but a decode step finds the prompts in the cache: they are read by the eager model."""
        if phase == "prefill":
            return self.inputs(phase)
        requests = self.new_requests()
        args, _ = self.prefill(requests)
        with torch.no_grad(), experts_one_by_one(self.model):
            self.model.prefill(*args)
        return self.decode(self.ids("decode"), requests)
