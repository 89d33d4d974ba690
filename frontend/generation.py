"""Inputs of the two phases of text generation for Hugging Face causal language models with a static cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from .errors import ModelSourceError

Phase = Literal["prefill", "decode"]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""``(args, kwargs)`` of one call."""


def positions_are_given() -> bool:
    """Whether a static cache does not know its length: transformers 4 counts its rows that are not zero."""
    import transformers

    return int(transformers.__version__.partition(".")[0]) < 5


def cache_argument(model: nn.Module) -> str:
    """What ``model.forward`` calls its cache.

    transformers renamed ``past_key_values`` to ``cache``; where both are taken, the old name warns. The signature tells
    also behind the decorators of ``forward``.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class GenerationCase:
    """A causal LM with a batch size, a prompt length and a cache length (in tokens).

    ``seed`` chooses the token ids. The model's method is ``forward``.
    """

    model: nn.Module
    batch: int = 1
    prefill_tokens: int = 96
    max_cache_len: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens < self.max_cache_len:
            raise ValueError(
                f"a prompt of {self.prefill_tokens} tokens needs a cache of at least {self.prefill_tokens + 1}, "
                f"not {self.max_cache_len}"
            )

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.model.parameters()).device

    def ids(self, phase: Phase, step: int = 0) -> torch.Tensor:
        """Token ids, int64: ``[batch, prefill_tokens]`` for the prefill, ``[batch, 1]`` for decode step ``step``."""
        tokens = self.prefill_tokens if phase == "prefill" else 1
        generator = torch.Generator().manual_seed((self.seed << 16) + (0 if phase == "prefill" else 1 + step))
        vocabulary = cast("Any", self.model).config.get_text_config(decoder=True).vocab_size
        ids = torch.randint(0, vocabulary, (self.batch, tokens), generator=generator)
        return ids.to(self.device)

    def new_cache(self) -> Any:
        """An empty ``transformers.StaticCache`` for this model; its tensors come with `state.prepare_state`.

        Raises `ModelSourceError` for a model that transformers has no static cache for.

        Layers with a window hold every token like the others: those of transformers that hold the window alone count
        their tokens in Python, which no graph can. The model's mask hides what is outside the window in both.
        """
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        try:
            cache = StaticCache(config=cast("Any", self.model).config, max_cache_len=self.max_cache_len)
        except KeyError as e:
            raise ModelSourceError(
                f"transformers has no static cache for layers of the type {e.args[0]!r} ({type(self.model).__name__}): "
                "compile it from Python or from path.py:factory, with a cache of your own whose tensors keep their "
                "storage") from e
        cache.layers = [StaticLayer(self.max_cache_len) if type(layer) is StaticSlidingWindowLayer else layer
                        for layer in cache.layers]
        return cache

    def prefill(self, ids: torch.Tensor, cache: Any) -> Call:
        """The call that reads the prompt ``ids`` ``[batch, tokens]`` into ``cache``."""
        kwargs = {cache_argument(self.model): cache, "use_cache": True}
        if positions_are_given():
            past = int(cache.get_seq_length())
            kwargs["cache_position"] = torch.arange(past, past + ids.shape[1], device=ids.device)
        return (ids,), kwargs

    def decode(self, ids: torch.Tensor, cache: Any) -> Call:
        """The call that reads one token per sequence, ``ids`` ``[batch, 1]``, behind what ``cache`` holds."""
        return self.prefill(ids, cache)

    def inputs(self, phase: Phase) -> Call:
        """The call of ``phase`` with a new cache, as `first`."""
        return self.first(phase, self.new_cache())

    def first(self, phase: Phase, cache: Any) -> Call:
        """The call of ``phase`` with the empty ``cache``. Layers of linear attention note in Python whether they have
        read tokens, so that a decode step is another graph behind a prompt: it gets a cache of its own, `filled`."""
        if phase == "decode" and any(hasattr(layer, "has_previous_state") for layer in cache.layers):
            return self.filled(phase)
        return self.prefill(self.ids(phase), cache)

    def filled(self, phase: Phase) -> Call:
        """As `inputs`, but a decode step finds the prompt in the cache: it is read by the eager model."""
        if phase == "prefill":
            return self.inputs(phase)
        cache = self.new_cache()
        args, kwargs = self.prefill(self.ids("prefill"), cache)
        with torch.no_grad():
            self.model(*args, **kwargs)
        return self.decode(self.ids("decode"), cache)
