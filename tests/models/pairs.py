"""Tiny `transformers` models and the zoo's models with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from cannopy.models.deepseek import Deepseek, DeepseekConfig
from cannopy.models.lively import lively_
from cannopy.models.longcat import Longcat, LongcatConfig
from cannopy.models.qwen import Qwen, QwenConfig
from cannopy.models.serving import ServingModel
from cannopy.models.weights import fill

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
OWN_YARN = {"theta": 10000.0, "factor": 40.0, "original_positions": 64, "mscale_all_dim": 1.0}
MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
       "num_attention_heads": 4}
DEEPSEEK = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24,
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_group": 4, "topk_group": 2, **MLA}
INDEX = {"index_topk": 6, "index_n_heads": 4, "index_head_dim": 16}


@dataclass(frozen=True)
class Pair:
    """A stock model and ours, same weights, float32."""

    stock: nn.Module
    own: ServingModel


def _pair(stock: nn.Module, own: ServingModel, rename: Callable[[str], str | None] = lambda n: n) -> Pair:
    lively_(stock, 0)
    fill(own, stock.state_dict().items(), rename)
    return Pair(stock.eval(), own.eval())


def _stock(architecture: str, config: Any) -> nn.Module:
    return getattr(transformers, architecture)._from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def deepseek_v3() -> Pair:
    config = transformers.DeepseekV3Config(**DEEPSEEK, num_key_value_heads=4, rope_parameters=dict(YARN), head_dim=8)
    return _pair(_stock("DeepseekV3ForCausalLM", config), Deepseek(DeepseekConfig(**DEEPSEEK, rope=OWN_YARN)))


def kimi_k2() -> Pair:
    sizes = DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_attention_heads": 2}
    config = transformers.DeepseekV3Config(**sizes, num_key_value_heads=2, rope_parameters=dict(YARN), head_dim=8)
    return _pair(_stock("DeepseekV3ForCausalLM", config), Deepseek(DeepseekConfig(**sizes, rope=OWN_YARN)))


def deepseek_v32() -> Pair:
    config = transformers.DeepseekV32Config(
        **DEEPSEEK, **INDEX, num_key_value_heads=4, rope_parameters=dict(YARN), head_dim=8
    )
    return _pair(_stock("DeepseekV32ForCausalLM", config), Deepseek(DeepseekConfig(**DEEPSEEK, **INDEX, rope=OWN_YARN)))


def longcat() -> Pair:
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24,
             "n_routed_experts": 6, "zero_expert_num": 4, "moe_topk": 3, **MLA}
    rope = {"rope_type": "default", "rope_theta": 1e7}
    config = transformers.LongcatFlashConfig(**sizes, head_dim=8, rope_parameters=rope)
    stock = _stock("LongcatFlashForCausalLM", config)
    own = Longcat(LongcatConfig(**sizes))
    lively_(stock, 0)
    state = {  # transformers reserves rows for zero experts, which have no weights
        n: t[: sizes["n_routed_experts"]] if n.endswith("gate_up_proj") else t for n, t in stock.state_dict().items()
    }
    fill(own, state.items())
    return Pair(stock.eval(), own.eval())


QWEN = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6}


def qwen2() -> Pair:
    config = transformers.Qwen2Config(**QWEN, intermediate_size=96, tie_word_embeddings=True,
                                      rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    own = Qwen(QwenConfig(**QWEN, head_dim=16, intermediate_size=96, attention_bias=True, tie_word_embeddings=True))
    return _pair(_stock("Qwen2ForCausalLM", config), own)


def qwen3_moe(renorm: bool = True) -> Pair:
    moe = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": renorm}
    config = transformers.Qwen3MoeConfig(**QWEN, **moe, head_dim=32, mlp_only_layers=[], decoder_sparse_step=1,
                                         rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    return _pair(_stock("Qwen3MoeForCausalLM", config), Qwen(QwenConfig(**QWEN, **moe, head_dim=32, qk_norm=True)))


PAIRS = {"deepseek-r1": deepseek_v3, "kimi-k2": kimi_k2, "deepseek-v3.2": deepseek_v32, "longcat-flash": longcat,
         "qwen2.5": qwen2, "qwen3-moe": qwen3_moe}
