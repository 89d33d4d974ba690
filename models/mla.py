"""Multi-head latent attention (MLA), with DeepSeek-V3.2's lightning indexer where the model has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .paging import Step
from .parts import RMSNorm, attend, rotate_halves, rotate_interleaved, softmax_scale


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer: heads of ``dim``, and how many keys it picks per query."""

    heads: int
    dim: int
    topk: int


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of one latent attention; ``q_scale`` multiplies queries, ``kv_scale`` latents (as LongCat does)."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    eps: float = 1e-6
    q_scale: float = 1.0
    kv_scale: float = 1.0
    indexer: Indexer | None = None


@dataclass(frozen=True)
class LatentPages:
    """Paged cache of one latent attention, ``[blocks, block_size, 1, dim]`` each; ``index``: the indexer's keys."""

    latent: Tensor
    rope: Tensor
    index: Tensor | None = None

    @classmethod
    def empty(cls, sizes: LatentSizes, blocks: int, block_size: int, like: Tensor) -> LatentPages:
        """Zeros with the dtype and on the device of ``like``."""
        shapes = [sizes.kv_rank, sizes.rope] + ([sizes.indexer.dim] if sizes.indexer else [])
        return cls(*(like.new_zeros(blocks, block_size, 1, dim) for dim in shapes))


class LightningIndexer(nn.Module):
    """Picks the keys that a query attends to: the largest ``Σ_h w_h · relu(q_h · k)``."""

    def __init__(self, sizes: LatentSizes, indexer: Indexer) -> None:
        super().__init__()
        self.sizes = indexer
        self.rope = sizes.rope
        self.wq_b = nn.Linear(sizes.q_rank, indexer.heads * indexer.dim, bias=False)
        self.wk = nn.Linear(sizes.hidden, indexer.dim, bias=False)
        self.k_norm = nn.LayerNorm(indexer.dim, eps=1e-6)
        self.weights_proj = nn.Linear(sizes.hidden, indexer.heads, bias=False)

    def forward(self, x: Tensor, q_latent: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: Tensor) -> Tensor:
        """True at the picked keys, ``[groups, queries, keys]``; ``x`` ``[T, hidden]``, ``q_latent`` ``[T, q_rank]``."""
        cos, sin = angles
        query = self.wq_b(q_latent).unflatten(-1, (self.sizes.heads, self.sizes.dim))
        query = self._rotated(query, cos[:, None], sin[:, None])
        key = self._rotated(self.k_norm(self.wk(x)), cos, sin)
        keys = step.exchange(pages, key[:, None])[:, :, 0]
        scores = torch.matmul(step.grouped(query).float(), keys.float().transpose(-1, -2)[:, None])
        scores = F.relu(scores * self.sizes.dim**-0.5)
        weights = step.grouped(self.weights_proj(x)).float() * self.sizes.heads**-0.5
        score = torch.matmul(weights[..., None, :], scores)[..., 0, :].masked_fill(~step.mask, float("-inf"))
        picked = score.topk(min(self.sizes.topk, score.shape[-1]), dim=-1).indices
        return torch.zeros_like(step.mask).scatter(-1, picked, True)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rope, rest = x.split([self.rope, self.sizes.dim - self.rope], dim=-1)
        return torch.cat((rotate_halves(rope, cos, sin), rest), dim=-1)


class LatentAttention(nn.Module):
    """Queries, keys and values through low-rank latents; the cache holds the normalised latent and one rotary key."""

    def __init__(self, sizes: LatentSizes, rope: Mapping[str, Any]) -> None:
        super().__init__()
        self.sizes = sizes
        self.scale = softmax_scale(sizes.nope + sizes.rope, rope)
        self.q_a_proj = nn.Linear(sizes.hidden, sizes.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_rank, sizes.eps)
        self.q_b_proj = nn.Linear(sizes.q_rank, sizes.heads * (sizes.nope + sizes.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(sizes.hidden, sizes.kv_rank + sizes.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, sizes.eps)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, sizes.heads * (sizes.nope + sizes.value), bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.value, sizes.hidden, bias=False)
        self.indexer = LightningIndexer(sizes, sizes.indexer) if sizes.indexer else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], step: Step, pages: LatentPages) -> Tensor:
        """``[T, hidden]`` → ``[T, hidden]``; writes this step's latents into ``pages``."""
        s = self.sizes
        cos, sin = angles
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query = self.q_b_proj(q_latent).unflatten(-1, (s.heads, s.nope + s.rope))
        if s.q_scale != 1.0:
            query = query * s.q_scale
        q_nope, q_rope = query.split([s.nope, s.rope], dim=-1)
        query = torch.cat((q_nope, rotate_interleaved(q_rope, cos[:, None], sin[:, None])), dim=-1)

        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.kv_rank, s.rope], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if s.kv_scale != 1.0:
            latent = latent * s.kv_scale
        latent = step.exchange(pages.latent, latent[:, None])[:, :, 0]
        k_rope = step.exchange(pages.rope, rotate_interleaved(k_rope, cos, sin)[:, None])

        k_nope, value = self.kv_b_proj(latent).unflatten(-1, (s.heads, s.nope + s.value)).split([s.nope, s.value], -1)
        key = torch.cat((k_nope, k_rope.expand(-1, -1, s.heads, -1)), dim=-1)
        mask = step.mask
        if self.indexer is not None:
            assert pages.index is not None  # made with the same sizes
            mask = mask & self.indexer(x, q_latent, angles, step, pages.index)
        out = attend(step.grouped(query), key, value, mask, self.scale)
        y: Tensor = self.o_proj(step.packed(out).flatten(1))
        return y
