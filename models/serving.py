"""What the zoo's models have in common: the two steps of a serving engine around a decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .paging import Decode, Prefill, Step


class PagedCache:
    """The paged caches of one model: ``layers[i]`` belongs to its i-th attention. ``block_size`` counts tokens."""

    def __init__(self, layers: Sequence[Any], block_size: int) -> None:
        self.layers = list(layers)
        self.block_size = block_size


class ServingModel(nn.Module, ABC):
    """A causal language model for packed tokens and paged caches.

    ``model`` gives normalised hidden states ``[T, hidden]`` for tokens ``[T]``, a step and a cache, into which it
    writes the step's keys; ``lm_head`` makes logits of them.
    """

    model: nn.Module
    lm_head: nn.Linear

    @abstractmethod
    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """An empty cache of ``blocks`` blocks, block 0 among them."""

    def prefill(self, tokens: Tensor, ends: Tensor, slots: Tensor, cache: PagedCache) -> tuple[Tensor, Tensor]:
        """Read whole prompts, packed one behind the other, padding last.

        Args:
            tokens: ``[T]`` int64.
            ends: end of each prompt in ``tokens``, ``[requests]`` int, ascending.
            slots: cache slot of each token, ``[T]`` int64; of padding tokens a slot of block 0.
            cache: written in place.

        Returns:
            Logits behind the last token of each prompt ``[requests, vocabulary]`` and the hidden states ``[T, hidden]``
            that a draft module reads.
        """
        return self._run(tokens, Prefill(tokens.shape[0], ends, slots), cache)

    def decode(
        self, tokens: Tensor, lengths: Tensor, block_table: Tensor, slots: Tensor, cache: PagedCache
    ) -> tuple[Tensor, Tensor]:
        """Read the same number of tokens for every request: the last accepted one and the drafts behind it.

        Args:
            tokens: ``[requests · (1 + drafts)]`` int64.
            lengths: tokens of each request in the cache after this step, ``[requests]`` int.
            block_table: ``[requests, blocks per request]`` int; unused entries are 0.
            slots: cache slot of each token, ``[T]`` int64.
            cache: written in place.

        Returns:
            Logits behind each token ``[T, vocabulary]`` and the hidden states ``[T, hidden]``.
        """
        return self._run(tokens, Decode(tokens.shape[0], lengths, block_table, slots, cache.block_size), cache)

    def _run(self, tokens: Tensor, step: Step, cache: PagedCache) -> tuple[Tensor, Tensor]:
        hidden = self.model(tokens, step, cache)
        return self.lm_head(step.answers(hidden)), hidden


class Draft(nn.Module, ABC):
    """A multi-token prediction (MTP) module: from the next token and the hidden state before it, guesses the one after.

    It shares embedding and head with its target model and has a cache of its own.
    """

    @abstractmethod
    def hidden(self, tokens: Tensor, previous: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """Hidden states of ``tokens`` ``[T]`` and the target's ``previous`` hidden states, both ``[T, hidden]``."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""

    @abstractmethod
    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """An empty cache of ``blocks`` blocks, block 0 among them."""

    def prefill(
        self, tokens: Tensor, previous: Tensor, ends: Tensor, slots: Tensor, cache: PagedCache
    ) -> tuple[Tensor, Tensor]:
        """As `ServingModel.prefill`; ``tokens``: the prompts moved one to the left, each with its first new token."""
        step = Prefill(tokens.shape[0], ends, slots)
        hidden = self.hidden(tokens, previous, step, cache)
        return self.head(step.answers(hidden)), hidden

    def decode(
        self, tokens: Tensor, previous: Tensor, lengths: Tensor, block_table: Tensor, slots: Tensor, cache: PagedCache
    ) -> tuple[Tensor, Tensor]:
        """As `ServingModel.decode`."""
        step = Decode(tokens.shape[0], lengths, block_table, slots, cache.block_size)
        hidden = self.hidden(tokens, previous, step, cache)
        return self.head(hidden), hidden


def like(model: nn.Module) -> Tensor:
    """An example of the model's dtype and device: its embedding."""
    return next(m.weight for m in model.modules() if isinstance(m, nn.Embedding))

