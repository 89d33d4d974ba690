"""Bytes that a die holds: weights, caches, buffers of dispatch and combine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cannopy.stream_scheduler.constants import Constants
from cannopy.stream_scheduler.network.attention import cache_bytes
from cannopy.stream_scheduler.network.builder import Scene

BLOCK = 128
"""Tokens per cache block."""
LINE, PAYLOAD = 512, 480
"""Bytes of a line of the dispatch window, and those of them that carry data."""


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose; ``reserved`` for runtime, workspace and fragmentation; ``capacity`` is the die's HBM."""

    weights: float
    caches: float
    buffers: float
    activations: float
    reserved: float
    capacity: float

    @property
    def total(self) -> float:
        """All of it with the reserve."""
        return self.weights + self.caches + self.buffers + self.activations + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def to_dict(self) -> dict[str, float | bool]:
        """Plain data, bytes."""
        return {
            "weights": self.weights, "caches": self.caches, "buffers": self.buffers, "activations": self.activations,
            "reserved": self.reserved, "total": self.total, "capacity": self.capacity, "fits": self.fits,
        }


def memory(s: Scene, capacity: float, constants: Constants) -> Memory:
    """Memory of one die of ``capacity`` bytes for the `Scene`."""
    reserved = constants["memory.reserved"] * capacity
    return Memory(weight_bytes(s), cache_total(s), _buffers(s, constants), _activations(s), reserved, capacity)


def weight_bytes(s: Scene) -> float:
    """Weights of one die, drafts included."""
    m, p = s.model, s.parallel
    per_layer = _attention(s) * (2 if m.family == "longcat" else 1)
    dense_tp = p.attn_tp if p.attn_tp > 1 else p.dense_tp
    dense = 3 * m.hidden * m.dense_width / dense_tp * s.quant.bytes_of("dense", m)
    experts = _experts(s)
    if m.family == "longcat":
        total = m.layers * (per_layer + 2 * dense + experts)
    else:
        total = m.layers * per_layer + m.dense_layers * dense + (m.layers - m.dense_layers) * experts
    if s.load.next_n:
        total += _attention(s) + (experts if m.draft == "layer" else dense) + 4 * m.hidden**2
    tp = p.attn_tp if p.attn_tp > 1 else p.lm_head_tp
    return total + 2 * m.vocab * m.hidden * (1 / p.embed_tp + 1 / tp) + 2 * m.embedding_parameters / p.dies


def _attention(s: Scene) -> float:
    m, a, p = s.model, s.model.attention, s.parallel

    def size(matrix: str, elements: float) -> float:
        return elements * s.quant.bytes_of(matrix, m)

    if a.kind == "gqa":
        kv_heads = max(1, a.kv_heads // p.attn_tp)
        return (size("qkv", m.hidden * (s.heads + 2 * kv_heads) * a.dim)
                + size("o_proj", s.heads * a.dim * m.hidden / p.o_proj_tp))
    total = (size("q_a", m.hidden * a.q_rank) + size("q_b", a.q_rank * s.heads * (a.nope + a.rope))
             + size("kv_a", m.hidden * (a.rank + a.rope)) + 2 * a.rank * (s.heads * a.nope + s.own_heads * a.value)
             + size("o_proj", s.own_heads * a.value * m.hidden / p.o_proj_tp))
    if a.indexer is not None:
        i = a.indexer
        total += size("indexer_q", a.q_rank * i.heads * i.dim) + 2 * m.hidden * (i.dim + i.heads)
    return total


def _experts(s: Scene) -> float:
    m, e = s.model, s.model.experts
    if e is None:
        return 0.0
    each = 3 * m.hidden * e.width * s.quant.bytes_of("experts", m) / s.parallel.moe_tp
    shared = 3 * m.hidden * e.shared_width * s.quant.bytes_of("shared", m) / s.parallel.moe_tp
    return e.experts / s.parallel.ep * each + shared + 4 * m.hidden * e.targets


def cache_total(s: Scene) -> float:
    """KV and indexer caches: whole blocks per sequence and one reserved block, every attention and the draft; of caches
    whose rows are spread, the blocks of one die."""
    m, a = s.model, s.model.attention
    blocks = math.ceil((s.load.context + s.load.q_tokens) / BLOCK) * s.load.sequences + 1
    tokens = math.ceil(blocks / s.parallel.kvp) * BLOCK
    attentions = m.layers * (2 if m.family == "longcat" else 1) + (1 if s.load.next_n else 0)
    if a.kind == "gqa":
        row = 2 * max(1, a.kv_heads // s.parallel.attn_tp) * a.dim * cache_bytes(s)
    else:
        row = (a.rank + a.rope) * cache_bytes(s)
        if a.indexer is not None:
            row += a.indexer.dim * 2 if s.quant.cache == "bf16" else a.indexer.dim + 2
    return attentions * tokens * row


def _buffers(s: Scene, constants: Constants) -> float:
    """HCCL window of dispatch and combine as the recipes size it: both halves twice, not below the smallest window."""
    least = constants["exchange.window_least"]
    e, p = s.model.experts, s.parallel
    if e is None or p.ep == 1 or s.load.phase == "prefill":
        return least if p.dies > 1 else 0.0
    hidden = s.model.hidden
    token = math.ceil(2 * hidden / PAYLOAD) * LINE
    dispatch = e.experts / p.ep * s.tokens * p.ep * token
    combine = e.top_k * s.tokens * math.ceil(2 * hidden / LINE) * LINE
    return max(2 * (dispatch + combine) + constants["exchange.window_fixed"], least)


def _activations(s: Scene) -> float:
    """The widest layer: hidden states, heads, expert rows and logits of one step in BF16."""
    m, a, T = s.model, s.model.attention, s.tokens
    widest = 4 * m.hidden + 2 * s.heads * (a.rank + a.rope if a.kind == "mla" else a.dim)
    rows = 0.0
    if m.experts is not None:
        rows = s.group_tokens * m.experts.top_k / s.parallel.ep * (m.hidden + 2 * m.experts.width)
    logits = (s.load.sequences if s.load.phase == "prefill" else T) * m.vocab
    return 2 * (T * widest + rows + logits)
