"""npu_sparse_flash_attention on the CPU, MLA-absorb mode."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error
from ._sequences import Sequence, sequences

OP = "npu_sparse_flash_attention"
INT64_MAX = (1 << 63) - 1
CHUNK_ELEMENTS = 1 << 22
"""Gathered key elements [rows, picks, D] at a time: 16 MiB of fp32."""


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = INT64_MAX,
    next_tokens: int = INT64_MAX,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query to the keys that sparse_indices names: ``softmax(scale·[q|q_rope]·[k|k_rope]ᵀ)·v``.

    query [T,N,512] or [B,S,N,512], query_rope alike with 64; key and value [blocks, block size, 1, 512] (PA_BSND),
    [T2,1,512] or [B,S2,1,512], key_rope alike with 64; sparse_indices int32 [T,1,k] or [B,S,1,k]: index b stands for
    keys ``b·sparse_block_size …`` of the request, -1 for none. Keys past the request's length, and in sparse_mode 3
    past ``length - q + i`` for query i of q, are not seen. A query that sees none gives zeros.
    Returns (out like query, –, –).
    fp32 inside, one rounding. Source: op-plugin doc of npu_sparse_flash_attention.
    """
    if value is None or query_rope is None or key_rope is None:
        raise value_error(OP, "mla-operands", "value, query_rope or key_rope is None")
    heads, width = query.shape[-2:]
    q = torch.cat((query.reshape(-1, heads, width), query_rope.reshape(-1, heads, query_rope.shape[-1])), dim=-1)
    latent, rope, values = (t.reshape(-1, t.shape[-1]) for t in (key, key_rope, value))
    indices = sparse_indices.reshape(q.shape[0], -1)
    out = torch.zeros((q.shape[0], heads, width), dtype=torch.float32)
    for sequence in sequences(
        OP, query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table, layout_query, layout_kv
    ):
        if sequence.length == 0:
            continue
        k = torch.cat((latent[sequence.keys], rope[sequence.keys]), dim=-1)
        step = max(1, CHUNK_ELEMENTS // (indices.shape[1] * sparse_block_size * k.shape[1]))
        for start in range(sequence.start, sequence.stop, step):
            stop = min(start + step, sequence.stop)
            chosen = _positions(indices[start:stop], sparse_block_size)
            seen = _visible(chosen, sequence, start, causal=sparse_mode == 3)
            rows = chosen.clamp(0, sequence.length - 1)
            v = values[sequence.keys[rows]]
            out[start:stop] = _attend(q[start:stop], k[rows], v, seen, scale_value)
    empty = torch.zeros(0, dtype=torch.float32)
    return out.view(query.shape).to(query.dtype), empty, empty.clone()


def _positions(indices: torch.Tensor, block: int) -> torch.Tensor:
    """Key positions [rows, k·block]; negative where an index is."""
    indices = indices.long()
    if block == 1:
        return indices
    spread = indices.unsqueeze(-1) * block + torch.arange(block)
    return spread.masked_fill((indices < 0).unsqueeze(-1), -1).flatten(1)


def _visible(positions: torch.Tensor, sequence: Sequence, start: int, *, causal: bool) -> torch.Tensor:
    bound = torch.full((positions.shape[0], 1), sequence.length)
    if causal:
        bound = (torch.arange(positions.shape[0]) + start - sequence.start + sequence.first_bound).unsqueeze(1)
    return (positions >= 0) & (positions < bound)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """q [c,N,D], k [c,s,D], v [c,s,Dv], seen [c,s] → fp32 [c,N,Dv]; rows that see nothing are zero."""
    scores = torch.matmul(q.float(), k.float().transpose(1, 2)) * scale
    hidden = ~seen.unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).masked_fill(hidden, 0.0)
    return torch.matmul(weights, v.float())
