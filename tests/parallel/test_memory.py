"""Memory of a die: weights equal to a formula of the sizes in the configuration, to the byte."""

from __future__ import annotations

import pytest
import torch

from cannopy import memory
from cannopy.fx_passes import weight_layout
from cannopy.fx_passes.parallel import Parallel
from tests.parallel import ranks

LAYERS = 2


@pytest.fixture(scope="module")
def case(activated: None) -> ranks.Case:
    return ranks.serving("deepseek-r1", num_hidden_layers=LAYERS)


def weights(case: ranks.Case, p: Parallel) -> int:
    """DeepSeek-R1 with one dense layer, bf16; router in fp32; the causal mask of attention."""
    c = case.model.config
    heads, hidden = c.num_attention_heads, c.hidden_size
    attention = (hidden * c.q_lora_rank + c.q_lora_rank * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
                 + hidden * (c.kv_lora_rank + c.qk_rope_head_dim) + heads * c.kv_lora_rank * c.qk_nope_head_dim
                 + heads * c.kv_lora_rank * c.v_head_dim + heads * c.v_head_dim * hidden // p.o_proj_tp)
    norms = 2 * hidden + c.q_lora_rank + c.kv_lora_rank
    dense = 3 * hidden * c.intermediate_size // p.dense_tp
    experts = 3 * hidden * c.moe_intermediate_size * (c.n_routed_experts // p.ep + c.n_shared_experts)
    vocabulary = c.vocab_size * hidden // p.embed_tp + c.vocab_size * hidden // p.lm_head_tp
    bf16 = LAYERS * (attention + norms) + dense + experts + vocabulary + hidden
    router = 4 * (hidden + 1) * c.n_routed_experts
    return 2 * bf16 + router + 4 * (c.qk_rope_head_dim // 2) + 2048 * 2048


@pytest.mark.parametrize("parallel", ["dp=4,ep=4", "dp=4,dense_tp=4,o_proj_tp=2,embed_tp=4,lm_head_tp=2",
                                      "dp=8,ep=8,o_proj_tp=4,dense_tp=4,embed_tp=8,lm_head_tp=8"])
def test_weights_to_the_byte(case: ranks.Case, parallel: str) -> None:
    sizes = Parallel.parse(parallel)
    program = ranks.cut(case.program, parallel, sizes.dies - 1)
    weight_layout.run(program)
    found = memory.of(program, "atlas-a3")
    assert found.weights == weights(case, sizes)
    kinds = {"ep", "o_proj_tp", "dense_tp", "embed_tp", "lm_head_tp"}
    assert set(found.buffsize_mb) == {kind for kind in kinds if getattr(sizes, kind) > 1}
    assert found.buffers == sum(2 * 2**20 * mb for mb in found.buffsize_mb.values())
    assert found.capacity == 64 * 2**30
    assert found.fits
    tensors = [c for layer in case.call(0)[-1].layers for c in vars(layer).values() if isinstance(c, torch.Tensor)]
    assert found.caches == sum(c.nbytes for c in tensors)


@pytest.mark.parametrize(("parallel", "heads"), [("attn_tp=2", 1), ("attn_tp=4", 1), ("dp=1", 2)])
def test_heads_of_keys(activated: None, parallel: str, heads: int) -> None:
    """Qwen3-MoE: query heads are divided, of two heads of keys a die has at least one, in weights and in caches."""
    case, sizes = ranks.serving("qwen3-moe", num_hidden_layers=LAYERS), Parallel.parse(parallel)
    program = ranks.cut(case.program, parallel, sizes.dies - 1) if sizes.attn_tp > 1 else case.program
    c, own = case.model.config, case.model.config.num_attention_heads // sizes.attn_tp
    found = memory.of(program, "atlas-a3")
    attention = c.hidden_size * c.head_dim * (2 * own + 2 * heads) + 2 * c.head_dim
    experts = c.num_experts * (3 * c.hidden_size * c.moe_intermediate_size + c.hidden_size)
    bf16 = LAYERS * (attention + experts + 2 * c.hidden_size) + 2 * c.vocab_size * c.hidden_size + c.hidden_size
    assert found.weights == 2 * bf16 + 4 * (c.head_dim // 2) + 2048 * 2048
    tensors = [t for layer in case.call(0)[-1].layers for t in vars(layer).values()]
    assert found.caches == sum(t.nbytes for t in tensors) * heads // c.num_key_value_heads


def test_what_does_not_fit(case: ranks.Case) -> None:
    found = memory.of(ranks.cut(case.program, "dp=4,ep=4", 0), "atlas-a3")
    small = memory.DieMemory(**{**vars(found), "capacity": found.total})
    assert small.fits
    assert not memory.DieMemory(**{**vars(found), "capacity": found.total - 1}).fits
    assert found.to_dict()["total"] == found.total
