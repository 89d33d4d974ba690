"""Presets: stock and own model of each size agree in every tensor, and tiny ones compute the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cannopy.models import zoo
from cannopy.models.requests import Requests
from cannopy.models.weights import fill

MODELS = ["deepseek-r1", "deepseek-v3.2", "kimi-k2", "longcat-flash", "qwen2.5", "qwen3-moe"]
BILLIONS = {"deepseek-r1": 671, "deepseek-v3.2": 672, "kimi-k2": 1026, "longcat-flash": 561, "qwen2.5": 72.7,
            "qwen3-moe": 235}
"""Published parameter counts, without MTP modules."""


def test_all_models_are_there() -> None:
    assert zoo.names() == MODELS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_stock_and_own_have_the_same_tensors(name: str, size: str) -> None:
    preset = dataclasses.replace(zoo.preset(name, size), meta=True)
    stock, own = zoo.build(preset), zoo.build_serving(preset)
    mine = {n: (tuple(t.shape), t.dtype) for n, t in own.state_dict().items()}
    other = {n: (tuple(t.shape), t.dtype) for n, t in stock.state_dict().items()}
    if name == "longcat-flash":  # transformers reserves rows for zero experts, which have no weights
        zero = preset.config.get("zero_expert_num", 256)
        other = {n: ((s[0] - zero, *s[1:]) if n.endswith("gate_up_proj") else s, d) for n, (s, d) in other.items()}
        # Published in float32, which transformers rounds when it makes a model instead of loading one.
        other = {n: (s, torch.float32 if ".router." in n else d) for n, (s, d) in other.items()}
    assert mine == other


@pytest.mark.parametrize("name", MODELS)
def test_full_size_is_the_published_one(name: str) -> None:
    model = zoo.build_serving(zoo.preset(name, "full"))
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_tiny_computes_what_the_stock_model_computes(name: str) -> None:
    preset = zoo.preset(name, "tiny")
    stock, own = zoo.build(preset, torch.float32, seed=2), zoo.build_serving(preset, torch.float32)
    experts = preset.config.get("n_routed_experts")
    fill(own, ((n, t[:experts] if n.endswith("gate_up_proj") else t) for n, t in stock.state_dict().items()))
    tokens = torch.randint(0, 512, (preset.prefill_tokens,), generator=torch.Generator().manual_seed(0))
    engine = Requests(own, 1, blocks_each=1, block_size=128)
    with torch.no_grad():
        wanted = stock(tokens[None], use_cache=False).logits[0, -1]
        [found], _ = own.prefill(*engine.prefill_inputs([tokens]), engine.cache)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
