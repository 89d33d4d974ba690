"""Language models of transformers: the stamped program is the one of all layers, with the same counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cannopy.frontend import state
from cannopy.frontend.generation import GenerationCase
from tests.frontend.models import MINI, mini_v32
from tests.regions.support import assert_same, counts, found, lower

LAYERS = 8


def _v32() -> nn.Module:
    return mini_v32(num_hidden_layers=LAYERS, first_k_dense_replace=1)


def _v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {k: v for k, v in MINI.items() if not k.startswith("index_")}
    config = DeepseekV3Config(**(sizes | {"num_hidden_layers": LAYERS, "first_k_dense_replace": 1}))
    return DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


QWEN = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def _qwen(kind: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**QWEN)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=torch.bfloat16).eval()


CASES: dict[str, tuple[Any, str, int]] = {
    "qwen3 decode": (lambda: _qwen("Qwen3"), "decode", 4),
    "qwen3_moe prefill": (lambda: _qwen("Qwen3Moe"), "prefill", 4),
    "deepseek_v3 decode": (_v3, "decode", 5),
    "deepseek_v32 decode": (_v32, "decode", 5),
    "deepseek_v32 prefill": (_v32, "prefill", 5),
}


@pytest.mark.parametrize(
    "name", [n if n.startswith("qwen3 ") else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_stamped_is_whole(name: str) -> None:
    make, phase, captured = CASES[name]
    model = make()
    args, kwargs = GenerationCase(model, batch=1, prefill_tokens=8, max_cache_len=32).inputs(phase)
    state.prepare_state(model, args, kwargs)
    stamped, done = lower(model, args, kwargs)
    known = found(stamped)
    assert (known.reason, known.layers, known.captured, known.stamped) == ("", LAYERS, captured, True)
    whole, done_whole = lower(model, args, kwargs, regions=False)
    assert_same(stamped, whole)
    assert counts(stamped, done) == counts(whole, done_whole)
