"""Prefill buckets: results and caches are those of the eager call, and padding stays where nobody reads it.

Models are float32, so that a row of padding that is read shows; later decode steps run in eager mode.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cannopy
from cannopy import CannopyError
from cannopy.buckets import Buckets
from cannopy.models.lively import lively_
from cannopy.models.qwen import Qwen, QwenConfig
from cannopy.models.requests import Requests
from cannopy.parity import serving
from tests.models.pairs import QWEN

PROMPTS = 3
SIZES = (8, 24)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@cache
def packed() -> tuple[Qwen, Buckets]:
    model = Qwen(QwenConfig(**QWEN, head_dim=16, intermediate_size=96, attention_bias=True)).eval()
    lively_(model, 0)
    return model, Buckets(model, SIZES, requests(model).cache, PROMPTS, cannopy.Options(use_cache=False))


def requests(model: Qwen, count: int = PROMPTS) -> Requests:
    found = Requests(model, count, blocks_each=2, block_size=16, spare=2 * (PROMPTS - count) + 1)
    serving.fill(found.cache)
    return found


def prompts(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 8), min_size=1, max_size=PROMPTS))
def test_any_prompts_that_fit(lengths: list[int]) -> None:
    model, buckets = packed()
    ours, eager = requests(model, len(lengths)), requests(model, len(lengths))
    before = [t.clone() for _, t in serving.tensors(ours.cache)]
    inputs = ours.prefill_inputs(prompts(lengths))
    step = torch.arange(2 * len(lengths)).view(-1, 2)
    with torch.no_grad():
        logits, hidden = buckets(*inputs, ours.cache)
        wanted, wanted_hidden = model.prefill(*eager.prefill_inputs(prompts(lengths)), eager.cache)
        torch.testing.assert_close(logits, wanted, **CLOSE)
        torch.testing.assert_close(hidden, wanted_hidden, **CLOSE)
        for old, (_, new), (_, other) in zip(before, serving.tensors(ours.cache), serving.tensors(eager.cache),
                                             strict=True):
            untouched = torch.ones(old.shape[0] * 16, dtype=torch.bool)
            untouched[:16] = False  # block 0, which belongs to nobody
            untouched[inputs[-1]] = False
            rows = [t.flatten(0, 1) for t in (old, new, other)]
            assert torch.equal(rows[0][untouched].view(torch.int32), rows[1][untouched].view(torch.int32))
            torch.testing.assert_close(rows[1][inputs[-1]], rows[2][inputs[-1]], **CLOSE)
        later = model.decode(*ours.decode_inputs(step), ours.cache)[0]
        torch.testing.assert_close(later, model.decode(*eager.decode_inputs(step), eager.cache)[0], **CLOSE)


@pytest.mark.slow
def test_report_and_limits_of_a_serving_model() -> None:
    model, shared = packed()
    buckets = Buckets.__new__(Buckets)
    buckets.__dict__ |= shared.__dict__ | {"uses": [type(use)(use.size, use.predicted_us) for use in shared.uses]}
    for lengths in ([5], [4, 4], [9, 6]):
        own = requests(model, len(lengths))
        buckets(*own.prefill_inputs(prompts(lengths)), own.cache)
    small, large = buckets.report()
    assert [(u.size, u.calls, u.tokens, u.padded) for u in (small, large)] == [(8, 2, 13, 3), (24, 1, 15, 9)]
    assert small.share == pytest.approx(3 / 16)
    assert small.predicted_us is not None
    assert large.predicted_us is not None
    assert small.padding_us == pytest.approx(small.predicted_us * 3 / 8)
    assert large.padding_us == pytest.approx(max(0.0, (large.predicted_us - small.predicted_us) * 9 / 16))
    own = requests(model)
    with pytest.raises(CannopyError, match="25 tokens do not fit: the buckets are 8, 24, so 1 to 24 tokens per call"):
        buckets(*own.prefill_inputs(prompts([9, 9, 7])), own.cache)
    with pytest.raises(CannopyError, match="4 prompts: the buckets are compiled for 3"):
        buckets(torch.zeros(4, dtype=torch.long), torch.arange(1, 5), torch.arange(4), own.cache)
    with pytest.raises(CannopyError, match="no prompts: ends is empty"):
        buckets(torch.zeros(4, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.arange(4), own.cache)
    assert [use.calls for use in buckets.report()] == [2, 1]


def stock(**more: object) -> nn.Module:
    config = transformers.Qwen2Config(**QWEN, intermediate_size=96, **more)
    model = transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.float32)
    return lively_(model, 0).eval()


def static(model: nn.Module, length: int = 20) -> transformers.StaticCache:
    return transformers.StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.slow
def test_a_static_cache_is_left_as_without_padding() -> None:
    model = stock()
    buckets = Buckets(model, [12], static(model), 2, cannopy.Options(use_cache=False))
    for past in (0, 3):
        caches = static(model), static(model)
        ids = torch.randint(0, 97, (2, past + 5), generator=torch.Generator().manual_seed(past))
        with torch.no_grad():
            for one in caches:
                if past:
                    model(ids[:, :past], cache=one, use_cache=True)
            ours = buckets(ids[:, past:], caches[0])
            wanted = model(ids[:, past:], cache=caches[1], use_cache=True)
            torch.testing.assert_close(ours.logits, wanted.logits, **CLOSE)
            assert [int(one.get_seq_length()) for one in caches] == [past + 5] * 2
            for step in range(8):  # over the rows that the padding has written, and on
                token = torch.full((2, 1), step)
                pair = [model(token, cache=one, use_cache=True).logits for one in caches]
                torch.testing.assert_close(*pair, **CLOSE)
    full = static(model)
    model(torch.zeros(2, 9, dtype=torch.long), cache=full, use_cache=True)
    with pytest.raises(CannopyError, match="5 tokens behind 9 in the cache are padded to 12, which its 20 rows"):
        buckets(ids[:, :5], full)


def test_what_padding_could_spoil_is_refused() -> None:
    model = stock()
    with pytest.raises(CannopyError, match="a bucket of 32 tokens does not fit the cache of 20"):
        Buckets(model, [8, 32], static(model))
    sliding = stock(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(CannopyError, match=r"layer 1 of the cache \(StaticSlidingWindowLayer\) cannot be cropped"):
        Buckets(sliding, [8], static(sliding))
    dynamic = stock(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(CannopyError, match="rotary_emb: dynamic rotary angles depend on the number of tokens"):
        Buckets(dynamic, [8], static(dynamic))
    both = stock()
    both.model.layers[1].self_attn.is_causal = False
    with pytest.raises(CannopyError, match=r"model\.layers\.1\.self_attn does not say that its attention is causal"):
        Buckets(both, [8], static(both))
    cache = static(model)
    cache.layers[0].indexer_position_ids = torch.zeros(1)
    with pytest.raises(CannopyError, match="layer 0 of the cache"):
        Buckets(model, [8], cache)
    with pytest.raises(CannopyError, match="a bucket of 2 tokens is too small for 3 prompts"):
        Buckets(Qwen(QwenConfig(**QWEN, head_dim=16, intermediate_size=96)), [2], SimpleNamespace(block_size=16), 3)
    with pytest.raises(CannopyError, match="buckets need sizes"):
        Buckets(model, [], static(model))
