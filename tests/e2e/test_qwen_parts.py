"""Biases on q, k and v, norms of q and k, and a head tied to the embedding: compiled together, from the cache again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import cannopy
from cannopy.frontend.serving import ServingCase
from cannopy.models.lively import lively_
from cannopy.models.qwen import Qwen, QwenConfig

LAYERS = 2


def model() -> Qwen:
    sizes = QwenConfig(vocab_size=256, hidden_size=256, num_hidden_layers=LAYERS, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=128, intermediate_size=256, attention_bias=True, qk_norm=True,
                       tie_word_embeddings=True)
    return lively_(Qwen(sizes).bfloat16(), 0).eval().requires_grad_(False)  # type: ignore[return-value]


@pytest.mark.slow
def test_bias_head_norms_and_tied_head(tmp_path: Path) -> None:
    qwen = model()
    assert qwen.lm_head.weight is qwen.model.embed_tokens.weight
    args, _ = ServingCase(qwen, 2, 20, 128, next_n=1).filled("decode")
    options = cannopy.Options(phase="decode", cache_dir=tmp_path)

    def call(method: object, dtype: torch.dtype) -> torch.Tensor:
        *inputs, cache = copy.deepcopy(args)
        for layer in cache.layers:
            for name in ("key", "value"):
                object.__setattr__(layer, name, getattr(layer, name).to(dtype))
        return method(*inputs, cache)[0].double()  # type: ignore[operator]

    compiled = cannopy.compile(qwen, "decode", copy.deepcopy(args), options=options)
    fusions, kernels = compiled.report.fusions, compiled.report.kernels
    assert (fusions["add_rms_norm"], fusions["rms_norm"]) == (2 * LAYERS, 1 + 2 * LAYERS)
    assert kernels["MatMul"] == 3 * LAYERS + 1, "o, gate with up, down; the head"
    assert kernels["MatMulV2"] == 3 * LAYERS, f"q, k and v with their biases: {kernels}"
    assert kernels.get("BiasAdd", 0) == 0
    assert kernels.get("Add", 0) <= 1, "biases are operands of the products; positions are added outside of the layers"
    assert compiled.report.cache_copies == 0

    found = call(compiled, torch.bfloat16)
    again = cannopy.compile(qwen, "decode", copy.deepcopy(args), options=options)
    assert again.report.cache["status"] == "hit", again.report.cache
    assert torch.equal(call(again, torch.bfloat16), found)

    plain = call(qwen.decode, torch.bfloat16)
    exact = call(copy.deepcopy(qwen).double().decode, torch.float64)
    error, allowed = ((x - exact).norm() / exact.norm() for x in (found, plain))
    assert error < 1.5 * allowed
