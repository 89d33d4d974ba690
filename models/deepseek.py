"""DeepSeek-V3.2, DeepSeek-R1 (also V3) and Kimi-K2: latent attention, sigmoid routing in groups, one shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mla import Indexer, LatentAttention, LatentPages, LatentSizes
from .paging import Step
from .parts import Experts, GatedMLP, RMSNorm, Rotary
from .serving import Draft, PagedCache, ServingModel, like


@dataclass(frozen=True)
class DeepseekConfig:
    """Sizes by the names of the published config files. ``index_topk`` None: no indexer (V3, R1, Kimi-K2)."""

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    first_k_dense_replace: int = 3
    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"theta": 10000.0})
    index_topk: int | None = None
    index_n_heads: int = 64
    index_head_dim: int = 128

    def attention(self) -> LatentSizes:
        """The sizes of its attention."""
        indexer = Indexer(self.index_n_heads, self.index_head_dim, self.index_topk) if self.index_topk else None
        return LatentSizes(
            self.hidden_size, self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim,
            self.qk_rope_head_dim, self.v_head_dim, indexer=indexer,
        )


class Router(nn.Module):
    """Sigmoid scores; a correction per expert decides who is chosen, but does not weigh; weak groups are left out."""

    e_score_correction_bias: Tensor

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, ``[T, k]`` each (int64, float32), for ``x`` ``[T, hidden]``."""
        c = self.config
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        if c.n_group > 1:
            choice = self._best_groups(choice)
        chosen = choice.topk(c.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * c.routed_scaling_factor
        return chosen, weights

    def _best_groups(self, choice: Tensor) -> Tensor:
        """``choice`` with −inf outside the groups whose two best experts have the largest sums."""
        grouped = choice.view(choice.shape[0], self.config.n_group, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config.topk_group, dim=-1, sorted=False).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0)
        left: Tensor = grouped.masked_fill(kept[..., None] == 0, float("-inf"))
        return left.flatten(1)


class MixtureOfExperts(nn.Module):
    """Routed experts plus one MLP that every token passes."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
        self.shared_experts = GatedMLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        chosen, weights = self.gate(x)
        y: Tensor = self.experts(x, chosen, weights) + self.shared_experts(x)
        return y


class DeepseekLayer(nn.Module):
    """Attention, then an MLP (``dense``) or experts, each behind an RMSNorm and beside a residual."""

    def __init__(self, config: DeepseekConfig, dense: bool) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config.attention(), config.rope)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size) if dense else MixtureOfExperts(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: LatentPages) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), angles, step, pages)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class DeepseekDecoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekLayer(config, dense=i < config.first_k_dense_replace) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.qk_rope_head_dim, config.rope)

    def forward(self, tokens: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """``[T]`` → ``[T, hidden]``."""
        x = self.embed_tokens(tokens)
        angles = self.rotary_emb(step.positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, step, cache.layers[i])
        y: Tensor = self.norm(x)
        return y


class Deepseek(ServingModel):
    """The language model. Parameters have the names of the published checkpoints, experts stacked (see `weights`)."""

    model: DeepseekDecoder

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """See `ServingModel.new_cache`."""
        sizes = self.config.attention()
        pages = [LatentPages.empty(sizes, blocks, block_size, like(self)) for _ in self.model.layers]
        return PagedCache(pages, block_size)


class SharedHead(nn.Module):
    """The draft's own last norm; its projection is the target's ``lm_head``."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekDraft(Draft):
    """DeepSeek's MTP module, layer ``num_hidden_layers`` of the checkpoint.

    ``shared`` is the target model, whose embedding and head it uses.
    """

    def __init__(self, shared: Deepseek) -> None:
        super().__init__()
        config = shared.config
        self.config = config
        self.embed_tokens = shared.model.embed_tokens
        self.lm_head = shared.lm_head
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = DeepseekLayer(config, dense=False)
        self.shared_head = SharedHead(config)
        self.rotary_emb = Rotary(config.qk_rope_head_dim, config.rope)

    def hidden(self, tokens: Tensor, previous: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """See `Draft.hidden`."""
        x = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(tokens)), self.hnorm(previous)), dim=-1))
        y: Tensor = self.block(x, self.rotary_emb(step.positions, x.dtype), step, cache.layers[0])
        return y

    def head(self, hidden: Tensor) -> Tensor:
        """See `Draft.head`."""
        y: Tensor = self.lm_head(self.shared_head.norm(hidden))
        return y

    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """A cache for its one layer."""
        return PagedCache([LatentPages.empty(self.config.attention(), blocks, block_size, like(self))], block_size)
