"""cannopy.Buckets: prefill compiled for several numbers of tokens; each call takes the smallest that it fits into.

Padding stands behind the tokens. Where it is written differs by the form of the model:

- A serving model (`cannopy.models.serving.ServingModel`) is given slots of block 0 for it, which belongs to no request.
- A model of `transformers` writes it into its static cache, behind the prompt, and the cache is cropped afterwards: its
  length is the prompt's, so the next call writes over these rows before any query may look at them (a query looks at
  keys up to its own position). Layers that cannot be cropped in place (sliding windows, whose rows the padding pushes
  out, and states of linear attention) are refused, and so are attention that is not causal and angles that depend on
  the number of tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cannopy.api import Compiled, compile
from cannopy.errors import CannopyError
from cannopy.frontend.generation import GenerationCase, Phase, positions_are_given
from cannopy.models.requests import padding_slots
from cannopy.models.serving import PagedCache, ServingModel
from cannopy.options import Options

_EACH_LENGTH = "compile each length with cannopy.compile"


@dataclass
class BucketUse:
    """What one bucket was used for.

    ``size``: tokens per sequence (packed tokens of a serving model); ``calls``; ``tokens`` that callers passed and
    ``padded`` ones beside them. ``predicted_us``: of one call by the cost model, None when the compilation gave none.
    ``padding_us``: what the padding of all calls costs by a straight line between the predictions of this bucket and
    the next smaller one (of nothing below the smallest), None without predictions.
    """

    size: int
    predicted_us: float | None
    calls: int = 0
    tokens: int = 0
    padded: int = 0
    padding_us: float | None = None

    @property
    def share(self) -> float:
        """Share of padding among the tokens computed, 0 before the first call."""
        return self.padded / (self.tokens + self.padded) if self.calls else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON takes."""
        return asdict(self) | {"share": self.share}


class _Form(Protocol):
    """How calls of one form of model are made longer, and their results short again."""

    method: str

    def example(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def tokens(self, args: tuple[Any, ...]) -> int: ...
    def run(self, compiled: Compiled, size: int, args: tuple[Any, ...]) -> Any: ...


class Buckets:
    """A compiled prefill for prompts of any length up to the largest of ``sizes``.

    Call it as `ServingModel.prefill` (``tokens, ends, slots, cache``; any number of prompts up to ``prompts``), or with
    ``(ids, cache)`` for a model of `transformers` (ids ``[prompts, tokens]``, all rows of the same length). The result
    is that of the eager call.

    Args:
        model: a `ServingModel`, or a causal language model of `transformers` (version 5).
        sizes: tokens per call (packed, or per sequence) to compile for, each at least ``prompts`` in serving form.
        cache: one like those of the calls: a `PagedCache`, or a ``StaticCache`` whose length holds the largest size.
        prompts: most prompts per call; for a model of `transformers` exactly so many rows.
        options: as of `cannopy.compile`; the phase is prefill.

    Raises:
        CannopyError: no size, a size that the cache does not hold, or a cache or model that padding could spoil.
        Whatever `cannopy.compile` raises.
    """

    def __init__(
        self, model: nn.Module, sizes: Iterable[int], cache: Any, prompts: int = 1, options: Options | None = None
    ) -> None:
        self.sizes = sorted(set(sizes))
        if not self.sizes or self.sizes[0] < 1 or prompts < 1:
            raise CannopyError(f"buckets need sizes and prompts above 0, found sizes {self.sizes}, prompts {prompts}")
        phase: Phase = "prefill"
        options = replace(options or Options(), phase=phase)
        self._form: _Form = (_Packed(model, cache, prompts, self.sizes[0]) if isinstance(model, ServingModel)
                             else _Static(model, cache, prompts, self.sizes[-1]))
        self.compiled: Mapping[int, Compiled] = {
            size: compile(model, self._form.method, *self._form.example(size), options) for size in self.sizes
        }
        self.uses = [BucketUse(size, c.report.schedule.get("predicted_us")) for size, c in self.compiled.items()]

    def pick(self, tokens: int) -> int:
        """The smallest size for so many tokens; `CannopyError` with the limits when there is none."""
        if tokens < 1 or tokens > self.sizes[-1]:
            raise CannopyError(
                f"{tokens} tokens do not fit: the buckets are {', '.join(map(str, self.sizes))}, "
                f"so 1 to {self.sizes[-1]} tokens per call",
                f"add a size of {tokens} or more, or read the prompts in several calls" if tokens > 0 else "",
            )
        return self.sizes[bisect.bisect_left(self.sizes, tokens)]

    def __call__(self, *args: Any) -> Any:
        tokens = self._form.tokens(args)
        size = self.pick(tokens)
        result = self._form.run(self.compiled[size], size, args)
        self._count(self.sizes.index(size), tokens)
        return result

    def report(self) -> list[BucketUse]:
        """What each bucket was used for until now."""
        return [replace(use) for use in self.uses]

    def _count(self, index: int, tokens: int) -> None:
        use = self.uses[index]
        use.calls += 1
        use.tokens += tokens
        use.padded += use.size - tokens
        smaller = self.uses[index - 1] if index else BucketUse(0, 0.0)
        if use.predicted_us is not None and smaller.predicted_us is not None:
            slope = (use.predicted_us - smaller.predicted_us) / (use.size - smaller.size)
            use.padding_us = (use.padding_us or 0.0) + max(0.0, slope * (use.size - tokens))


class _Packed:
    """Serving models: padding tokens at the end of the packed row, with slots of block 0."""

    method = "prefill"

    def __init__(self, model: ServingModel, cache: PagedCache, prompts: int, smallest: int) -> None:
        if smallest < prompts:
            raise CannopyError(f"a bucket of {smallest} tokens is too small for {prompts} prompts",
                               f"sizes of at least {prompts}, or fewer prompts")
        self.cache, self.prompts = cache, prompts
        self.device = next(model.parameters()).device

    def example(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prompts of about the same length."""
        ends = torch.arange(1, self.prompts + 1) * size // self.prompts
        slots = padding_slots(size, self.cache.block_size)
        tokens = torch.zeros(size, dtype=torch.long)
        return (*(t.to(self.device) for t in (tokens, ends, slots)), self.cache), {}

    def tokens(self, args: tuple[Any, ...]) -> int:
        """Packed tokens of a call, its own padding included."""
        if len(args) != 4:
            raise CannopyError(f"expected tokens, ends, slots and cache, found {len(args)} arguments",
                               "call the buckets as ServingModel.prefill")
        if not args[1].shape[0]:
            raise CannopyError("no prompts: ends is empty", "leave out calls that read nothing")
        if args[1].shape[0] > self.prompts:
            raise CannopyError(f"{args[1].shape[0]} prompts: the buckets are compiled for {self.prompts}",
                               f"Buckets(…, prompts={args[1].shape[0]}), or fewer prompts per call")
        return int(args[0].shape[0])

    def run(self, compiled: Compiled, size: int, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Prompts that are missing end where the last one ends, and have no tokens."""
        tokens, ends, slots, cache = args
        count, prompts = tokens.shape[0], ends.shape[0]
        logits, hidden = compiled(
            torch.cat((tokens, tokens.new_zeros(size - count))),
            torch.cat((ends, ends[-1:].expand(self.prompts - prompts))),
            torch.cat((slots, padding_slots(size - count, cache.block_size).to(slots))),
            cache,
        )
        return logits[:prompts], hidden[:count]


class _Static:
    """Models of `transformers`: padding on the right, and a cache that is cropped afterwards."""

    method = "forward"

    def __init__(self, model: nn.Module, cache: Any, prompts: int, largest: int) -> None:
        self.cache, self.prompts = cache, prompts
        self.case = GenerationCase(model, prompts)
        if positions_are_given():
            raise CannopyError("a static cache of transformers 4 counts its rows that are not zero, padding among them",
                               f"pip install -U transformers, or {_EACH_LENGTH}")
        _check_model(model)
        _check_layers(cache)
        room = min(layer.max_cache_len for layer in cache.layers)
        if largest > room:
            raise CannopyError(f"a bucket of {largest} tokens does not fit the cache of {room}",
                               f"sizes up to {room}, or a longer cache")

    def example(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A prompt of ``size`` tokens."""
        return self.case.prefill(torch.zeros(self.prompts, size, dtype=torch.long, device=self.case.device), self.cache)

    def tokens(self, args: tuple[Any, ...]) -> int:
        """Tokens per row of a call."""
        if len(args) != 2 or args[0].dim() != 2 or args[0].shape[0] != self.prompts:
            raise CannopyError(f"expected ids [{self.prompts}, tokens] and a cache, as the buckets are compiled for",
                               f"pass {self.prompts} rows, or make buckets with another number of prompts")
        return int(args[0].shape[1])

    def run(self, compiled: Compiled, size: int, args: tuple[Any, ...]) -> Any:
        """Token 0 as padding; rows of the result and the cache's length are the prompt's."""
        ids, cache = args
        count = ids.shape[1]
        _check_layers(cache)
        for layer in cache.layers:
            past = int(layer.cumulative_length) if layer.is_initialized else 0
            if past + size > layer.max_cache_len:
                raise CannopyError(
                    f"{count} tokens behind {past} in the cache are padded to {size}, which its {layer.max_cache_len} "
                    "rows do not hold", "a longer cache, or a size that fits")
        padded = torch.cat((ids, ids.new_zeros(self.prompts, size - count)), dim=1)
        call_args, call_kwargs = self.case.prefill(padded, cache)
        out = compiled(*call_args, **call_kwargs)
        if size > count:
            cache.crop(count - size)
        return _shortened(out, size, count)


def _check_model(model: nn.Module) -> None:
    """`CannopyError` for a model in which tokens behind a token may change its result."""
    causal = {name: module.is_causal for name, module in model.named_modules() if hasattr(module, "is_causal")}
    config = getattr(model, "config", None)
    if not causal or not all(causal.values()) or getattr(config, "is_causal", True) is False:
        name = next((n for n, value in causal.items() if not value), type(model).__name__)
        raise CannopyError(f"{name} does not say that its attention is causal (is_causal): prompts could see padding",
                           _EACH_LENGTH)
    for name, module in model.named_modules():
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope"):
            raise CannopyError(f"{name}: {module.rope_type} rotary angles depend on the number of tokens, padding "
                               "included", _EACH_LENGTH)


def _check_layers(cache: Any) -> None:
    """`CannopyError` for a cache with a layer in which rows of padding cannot be taken back."""
    from transformers.cache_utils import StaticIndexedLayer, StaticLayer

    for index, layer in enumerate(cache.layers):
        kept = type(layer) in (StaticLayer, StaticIndexedLayer) and getattr(layer, "is_croppable", False)
        if not kept or getattr(layer, "indexer_position_ids", None) is not None:
            raise CannopyError(f"layer {index} of the cache ({type(layer).__name__}) cannot be cropped in place, "
                               "so padding would stay in it", _EACH_LENGTH)


def _shortened(out: Any, size: int, count: int) -> Any:
    """``out`` with the logits of the first ``count`` of ``size`` tokens."""
    for name, value in out.items():
        if name == "logits":
            continue
        if isinstance(value, Tensor | tuple):
            raise CannopyError(f"the result has {name}, whose padding cannot be cut off", "ask for logits only")
    if out.logits.shape[1] != size:
        raise CannopyError(f"expected logits of {size} tokens, found {out.logits.shape[1]}",
                           "leave logits_to_keep at 0, so that every token has logits")
    out.logits = out.logits[:, :count]
    return out
