"""Qwen2.5 (dense, biases on q, k, v) and Qwen3-MoE (norms on q and k, softmax routing): grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .paging import Step
from .parts import Experts, GatedMLP, RMSNorm, Rotary, attend, rotate_halves
from .serving import PagedCache, ServingModel, like


@dataclass(frozen=True)
class QwenConfig:
    """Sizes by the names of the published config files; ``num_experts`` 0 makes every layer dense."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    attention_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"theta": 1000000.0})


@dataclass(frozen=True)
class KeyValuePages:
    """Paged cache of one attention: keys and values, ``[blocks, block_size, kv heads, head_dim]``."""

    key: Tensor
    value: Tensor


class GroupedAttention(nn.Module):
    """Attention whose keys and values serve several query heads each."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: KeyValuePages) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``; writes this step's keys and values into ``pages``."""
        cos, sin = (a[:, None] for a in angles)
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.config.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        keys = step.exchange(pages.key, rotate_halves(key, cos, sin))
        values = step.exchange(pages.value, value)
        query = step.grouped(rotate_halves(query, cos, sin))
        out = attend(query, keys, values, step.mask, self.config.head_dim**-0.5)
        y: Tensor = self.o_proj(step.packed(out).flatten(1))
        return y


class SparseMLP(nn.Module):
    """Routed experts without a shared one."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.topk, self.rescale = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        weights, chosen = F.softmax(self.gate(x).float(), dim=-1).topk(self.topk, dim=-1)
        if self.rescale:
            weights = weights / weights.sum(-1, keepdim=True)
        y: Tensor = self.experts(x, chosen, weights.to(x.dtype))
        return y


class QwenLayer(nn.Module):
    """Attention, then an MLP or experts, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.self_attn = GroupedAttention(config)
        self.mlp = SparseMLP(config) if config.num_experts else GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: KeyValuePages) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), angles, step, pages)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class QwenDecoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(QwenLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.head_dim, config.rope)

    def forward(self, tokens: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """``[T]`` → ``[T, hidden]``."""
        x = self.embed_tokens(tokens)
        angles = self.rotary_emb(step.positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, step, cache.layers[i])
        y: Tensor = self.norm(x)
        return y


class Qwen(ServingModel):
    """The language model. Parameters have the names of the published checkpoints, experts stacked (see `weights`)."""

    model: QwenDecoder

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.model = QwenDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """See `ServingModel.new_cache`."""
        c = self.config
        shape = (blocks, block_size, c.num_key_value_heads, c.head_dim)
        pages = [KeyValuePages(like(self).new_zeros(shape), like(self).new_zeros(shape)) for _ in self.model.layers]
        return PagedCache(pages, block_size)
