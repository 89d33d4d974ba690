"""Each model of the zoo computes what its `transformers` counterpart computes, in prefill and in decode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cannopy.models.requests import Requests
from tests.models.pairs import PAIRS, Pair, qwen3_moe

LIMIT = 1e-4


def expected(pair: Pair, tokens: Tensor) -> Tensor:
    """Logits behind every token of one sequence, ``[tokens, vocabulary]``."""
    with torch.no_grad():
        return pair.stock(tokens[None], use_cache=False).logits[0]


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= LIMIT * wanted.abs().max()


def sequences(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("padding", [0, 3])
def test_prefill_and_decode(name: str, padding: int) -> None:
    pair = PAIRS[name]()
    texts = sequences([14, 8, 11])
    prompts = [t[:n] for t, n in zip(texts, [7, 1, 4], strict=True)]
    wanted = [expected(pair, t) for t in texts]
    engine = Requests(pair.own, 3)
    with torch.no_grad():
        logits, hidden = pair.own.prefill(*engine.prefill_inputs(prompts, padding), engine.cache)
        close(logits, torch.stack([w[len(p) - 1] for w, p in zip(wanted, prompts, strict=True)]))
        assert hidden.shape[0] == 12 + padding
        for queries in (1, 3, 1, 2):
            at = list(engine.lengths)
            step = torch.stack([t[n : n + queries] for t, n in zip(texts, at, strict=True)])
            logits, _ = pair.own.decode(*engine.decode_inputs(step), engine.cache)
            close(logits, torch.cat([w[n : n + queries] for w, n in zip(wanted, at, strict=True)]))


def test_rejected_drafts_are_overwritten() -> None:
    pair = PAIRS["deepseek-v3.2"]()
    [text] = sequences([9])
    engine = Requests(pair.own, 1)
    with torch.no_grad():
        pair.own.prefill(*engine.prefill_inputs([text[:4]]), engine.cache)
        wrong = torch.tensor([[int(text[4]), 5, 6]])
        pair.own.decode(*engine.decode_inputs(wrong), engine.cache)
        engine.lengths = [5]
        logits, _ = pair.own.decode(*engine.decode_inputs(text[None, 5:8]), engine.cache)
    close(logits, expected(pair, text)[5:8])


def test_softmax_scores_without_rescaling() -> None:
    pair = qwen3_moe(renorm=False)
    [text] = sequences([9])
    engine = Requests(pair.own, 1)
    with torch.no_grad():
        logits, _ = pair.own.prefill(*engine.prefill_inputs([text]), engine.cache)
    close(logits[0], expected(pair, text)[-1])


@pytest.mark.parametrize("name", PAIRS)
def test_a_step_writes_its_own_slots_only(name: str) -> None:
    pair = PAIRS[name]()
    engine = Requests(pair.own, 2)
    with torch.no_grad():
        pair.own.prefill(*engine.prefill_inputs(sequences([5, 3])), engine.cache)
        tensors = [t for pages in engine.cache.layers for t in vars(pages).values() if t is not None]
        before = [t.clone() for t in tensors]
        inputs = engine.decode_inputs(torch.tensor([[1, 2], [3, 4]]))
        pair.own.decode(*inputs, engine.cache)
    for old, new in zip(before, tensors, strict=True):
        changed = (old != new).flatten(0, 1).flatten(1).any(-1).nonzero().flatten().tolist()
        assert changed == sorted(inputs[-1].tolist())
