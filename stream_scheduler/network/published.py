"""A `Model` from the sizes of a published ``config.json``, for models that ``models/*.yaml`` does not describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cannopy.stream_scheduler.network.model import Attention, Experts, Indexer, Model, UnknownModelError


def described(config: Mapping[str, Any], name: str) -> Model:
    """The model of ``config`` (names as published). `UnknownModelError` for a family that no formula is for."""
    try:
        if "zero_expert_num" in config:
            return _longcat(config, name)
        if config.get("kv_lora_rank"):
            return _deepseek(config, name)
        return _gqa(config, name)
    except KeyError as error:
        raise UnknownModelError(f"{name}: no cost model takes a configuration without {error}") from None


def _latent(c: Mapping[str, Any], indexer: Indexer | None) -> Attention:
    return Attention("mla", c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"],
                     c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"] + 2 * c["qk_rope_head_dim"], indexer)


def _deepseek(c: Mapping[str, Any], name: str) -> Model:
    indexer = Indexer(c["index_n_heads"], c["index_head_dim"], c["index_topk"]) if c.get("index_topk") else None
    width = c["moe_intermediate_size"]
    experts = Experts(c["n_routed_experts"], c["num_experts_per_tok"], width,
                      shared_width=width * c.get("n_shared_experts", 1))
    return Model(name, name, "deepseek", c["hidden_size"], c["num_hidden_layers"], c["first_k_dense_replace"],
                 c["vocab_size"], _latent(c, indexer), c["intermediate_size"], experts, frozenset(), "none")


def _longcat(c: Mapping[str, Any], name: str) -> Model:
    experts = Experts(c["n_routed_experts"], c["moe_topk"], c["expert_ffn_hidden_size"], c["zero_expert_num"])
    return Model(name, name, "longcat", c["hidden_size"], c["num_layers"], 0, c["vocab_size"], _latent(c, None),
                 c["ffn_hidden_size"], experts, frozenset(), "none")


def _gqa(c: Mapping[str, Any], name: str) -> Model:
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    attention = Attention("gqa", heads, kv_heads=c["num_key_value_heads"],
                          dim=c.get("head_dim") or c["hidden_size"] // heads)
    count = c.get("num_experts") or c.get("num_local_experts")
    experts = Experts(count, c["num_experts_per_tok"], c["moe_intermediate_size"]) if count else None
    return Model(name, name, "gqa", c["hidden_size"], layers, 0 if experts else layers, c["vocab_size"], attention,
                 c["intermediate_size"] or c["hidden_size"], experts, frozenset(), "none")
