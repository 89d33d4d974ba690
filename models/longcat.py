"""LongCat-Flash: two latent attentions and two dense MLPs per layer, experts on a shortcut beside the second half."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mla import LatentAttention, LatentPages, LatentSizes
from .paging import Step
from .parts import Experts, GatedMLP, RMSNorm, Rotary
from .serving import Draft, PagedCache, ServingModel, like


@dataclass(frozen=True)
class LongcatConfig:
    """Sizes by the names of the published config file."""

    vocab_size: int = 131072
    hidden_size: int = 6144
    num_layers: int = 28
    num_attention_heads: int = 64
    ffn_hidden_size: int = 12288
    expert_ffn_hidden_size: int = 2048
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 512
    zero_expert_num: int = 256
    moe_topk: int = 12
    routed_scaling_factor: float = 6.0
    rms_norm_eps: float = 1e-5
    rope: Mapping[str, Any] = field(default_factory=lambda: {"theta": 10000000.0})

    def attention(self) -> LatentSizes:
        """The sizes of each attention. Queries and latents are scaled by √(hidden / rank)."""
        return LatentSizes(
            self.hidden_size, self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank, self.qk_nope_head_dim,
            self.qk_rope_head_dim, self.v_head_dim, q_scale=(self.hidden_size / self.q_lora_rank) ** 0.5,
            kv_scale=(self.hidden_size / self.kv_lora_rank) ** 0.5,
        )


class ZeroExpertRouter(nn.Module):
    """Softmax over routed and zero experts; a correction decides who is chosen, but does not weigh."""

    e_score_correction_bias: Tensor

    def __init__(self, config: LongcatConfig) -> None:
        super().__init__()
        experts = config.n_routed_experts + config.zero_expert_num
        self.topk, self.factor = config.moe_topk, config.routed_scaling_factor
        self.classifier = nn.Linear(config.hidden_size, experts, bias=False, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, ``[T, k]`` each; numbers from ``n_routed_experts`` on are zero experts."""
        scores = F.linear(x.float(), self.classifier.weight.float()).softmax(dim=-1)
        chosen = (scores + self.e_score_correction_bias).topk(self.topk, dim=-1, sorted=False).indices
        return chosen, scores.gather(1, chosen) * self.factor


class ShortcutExperts(nn.Module):
    """Routed experts; a zero expert hands its token on unchanged."""

    def __init__(self, config: LongcatConfig) -> None:
        super().__init__()
        self.routed = config.n_routed_experts
        self.router = ZeroExpertRouter(config)
        self.experts = Experts(config.n_routed_experts, config.hidden_size, config.expert_ffn_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``."""
        chosen, weights = self.router(x)
        zero = chosen >= self.routed
        out = self.experts(x, chosen.masked_fill(zero, 0), weights.masked_fill(zero, 0.0))
        handed_on = weights.masked_fill(~zero, 0.0).sum(-1, keepdim=True)
        y: Tensor = out + (x * handed_on).to(x.dtype)
        return y


class LongcatLayer(nn.Module):
    """Attention, MLP, attention, MLP; the experts see what the first MLP sees and are added at the end."""

    def __init__(self, config: LongcatConfig) -> None:
        super().__init__()
        self.self_attn = nn.ModuleList(LatentAttention(config.attention(), config.rope) for _ in range(2))
        self.mlps = nn.ModuleList(GatedMLP(config.hidden_size, config.ffn_hidden_size) for _ in range(2))
        self.mlp = ShortcutExperts(config)
        self.input_layernorm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.post_attention_layernorm = nn.ModuleList(
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: tuple[LatentPages, LatentPages]
    ) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``; ``pages`` are those of the two attentions."""
        x = x + self.self_attn[0](self.input_layernorm[0](x), angles, step, pages[0])
        normed = self.post_attention_layernorm[0](x)
        shortcut = self.mlp(normed)
        x = x + self.mlps[0](normed)
        x = x + self.self_attn[1](self.input_layernorm[1](x), angles, step, pages[1])
        x = x + self.mlps[1](self.post_attention_layernorm[1](x))
        y: Tensor = x + shortcut
        return y


class LongcatDecoder(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, config: LongcatConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LongcatLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.qk_rope_head_dim, config.rope)

    def forward(self, tokens: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """``[T]`` → ``[T, hidden]``."""
        x = self.embed_tokens(tokens)
        angles = self.rotary_emb(step.positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, angles, step, (cache.layers[2 * i], cache.layers[2 * i + 1]))
        y: Tensor = self.norm(x)
        return y


class Longcat(ServingModel):
    """The language model. Parameters have the names of the published checkpoints, experts stacked (see `weights`)."""

    model: LongcatDecoder

    def __init__(self, config: LongcatConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LongcatDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """See `ServingModel.new_cache`; two attentions per layer."""
        sizes = self.config.attention()
        pages = [LatentPages.empty(sizes, blocks, block_size, like(self)) for _ in range(2 * self.config.num_layers)]
        return PagedCache(pages, block_size)


class LongcatDraft(Draft):
    """LongCat's MTP module: one latent attention and one dense MLP, an embedding of its own and the target's head."""

    def __init__(self, shared: Longcat) -> None:
        super().__init__()
        config = shared.config
        self.config = config
        self.lm_head = shared.lm_head
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = LatentAttention(config.attention(), config.rope)
        self.mlp = GatedMLP(config.hidden_size, config.ffn_hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config.qk_rope_head_dim, config.rope)

    def hidden(self, tokens: Tensor, previous: Tensor, step: Step, cache: PagedCache) -> Tensor:
        """See `Draft.hidden`."""
        x = self.eh_proj(torch.cat((self.enorm(self.embed_tokens(tokens)), self.hnorm(previous)), dim=-1))
        angles = self.rotary_emb(step.positions, x.dtype)
        x = x + self.self_attn(self.input_layernorm(x), angles, step, cache.layers[0])
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y

    def head(self, hidden: Tensor) -> Tensor:
        """See `Draft.head`."""
        y: Tensor = self.lm_head(self.norm(hidden))
        return y

    def new_cache(self, blocks: int, block_size: int = 128) -> PagedCache:
        """A cache for its one attention."""
        return PagedCache([LatentPages.empty(self.config.attention(), blocks, block_size, like(self))], block_size)
