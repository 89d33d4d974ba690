"""The harness on a real model: another correct implementation passes, wrong ones do not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from cannopy.frontend.generation import GenerationCase
from cannopy.models.lively import lively_
from cannopy.parity import generation


@pytest.fixture(scope="module")
def case() -> GenerationCase:
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        index_topk=16,
        index_n_heads=4,
        index_head_dim=64,
        max_position_embeddings=256,
    )
    model = DeepseekV32ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    return GenerationCase(lively_(model, 0), batch=2, prefill_tokens=40, max_cache_len=64, seed=0)


def _measured(case: GenerationCase, model: torch.nn.Module):
    forward = {"prefill": model, "decode": model}
    steps = generation.generate(case, forward, case.new_cache(), steps=4)
    report, _ = generation.check(case, steps)
    return report


def _variant(case: GenerationCase) -> DeepseekV32ForCausalLM:
    """The same model through other kernels: its own loop over experts, attention written out."""
    model = copy.deepcopy(case.model)
    model.config._experts_implementation = "eager"
    model.config._attn_implementation = "eager"
    return model


def test_another_correct_implementation_passes(case):
    report = _measured(case, _variant(case))
    assert report.failures == []
    assert [part.compiled.tokens for part in report.errors] == [80, 8]
    assert all(part.plain.median > 1e-3 for part in report.errors)
    assert sum(picks.tokens for picks in report.picks) > 500


def test_the_model_itself_has_the_errors_of_plain_bf16(case):
    report = _measured(case, case.model)
    for part in report.errors:
        assert part.compiled == part.plain
    assert all(picks.differ == 0 for picks in report.picks)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_scaled_attention_output_fails(case, layer):
    model = _variant(case)
    with torch.no_grad():
        model.model.layers[layer].self_attn.o_proj.weight.mul_(1.05)
    assert any("median error" in f for f in _measured(case, model).failures)


def test_a_wrong_indexer_fails_on_its_picks(case):
    model = _variant(case)
    with torch.no_grad():
        model.model.layers[1].self_attn.indexer.weights_proj.weight.neg_()
    assert any("is no tie" in f for f in _measured(case, model).failures)


def test_a_router_without_its_correction_fails_on_its_picks(case):
    model = _variant(case)
    with torch.no_grad():
        model.model.layers[2].mlp.gate.e_score_correction_bias.zero_()
    assert any("is no tie" in f for f in _measured(case, model).failures)


def test_a_cache_that_is_not_written_fails(case):
    """Decode steps that see an empty cache."""
    model = _variant(case)

    def forgetful(*args, **kwargs):
        kwargs["cache"].reset()
        return model(*args, **kwargs)

    steps = generation.generate(case, {"prefill": model, "decode": forgetful}, case.new_cache(), steps=2)
    report, _ = generation.check(case, steps)
    assert any(f.startswith("decode") for f in report.failures)
    assert not any(f.startswith("prefill") for f in report.failures)
