"""npu_lightning_indexer on the CPU."""

from __future__ import annotations

import torch

from ._sequences import Sequence, sequences

INT64_MAX = (1 << 63) - 1
CHUNK_ELEMENTS = 1 << 22
"""Scores [rows, heads, keys] computed at a time: 16 MiB of fp32."""


def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = INT64_MAX,
    next_tokens: int = INT64_MAX,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that matter to each query: top sparse_count of ``Σ_h weights[t,h]·relu(q[t,h]·k[s])``.

    query [T,N,128] (TND) or [B,S,N,128] (BSND); key [blocks, block size, 1, 128] (PA_BSND), [T2,1,128] or [B,S2,1,128];
    weights [T,N] or [B,S,N]. Returns int32 positions within the request, [T,1,sparse_count] or [B,S,1,sparse_count], in
    descending order of score (equal scores: lower position first), -1 after the last valid one, and an empty
    second tensor. sparse_mode 3 shows query i of q the first ``length - q + i + 1`` keys, mode 0 all of them.
    Scores are fp32. Source: op-plugin doc of npu_lightning_indexer.
    """
    heads, width = query.shape[-2:]
    q = query.reshape(-1, heads, width)
    w = weights.reshape(-1, heads)
    keys = key.reshape(-1, width)
    picks = torch.full((q.shape[0], sparse_count), -1, dtype=torch.int32)
    for sequence in sequences(
        "npu_lightning_indexer",
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
    ):
        _pick(picks, q, w, keys[sequence.keys].float(), sequence, causal=sparse_mode == 3)
    return picks.view(*query.shape[:-2], 1, sparse_count), query.new_zeros(0)


def _pick(
    picks: torch.Tensor, q: torch.Tensor, w: torch.Tensor, keys: torch.Tensor, sequence: Sequence, *, causal: bool
) -> None:
    """Fill `picks` for the rows of one request; `keys` are its keys in order, fp32."""
    if sequence.length == 0:
        return
    step = max(1, CHUNK_ELEMENTS // (q.shape[1] * sequence.length))
    count = min(picks.shape[1], sequence.length)
    position = torch.arange(sequence.length)
    for start in range(sequence.start, sequence.stop, step):
        stop = min(start + step, sequence.stop)
        products = torch.relu(torch.matmul(q[start:stop].float(), keys.t()))
        scores = torch.matmul(w[start:stop].float().unsqueeze(1), products).squeeze(1)
        if causal:
            bound = torch.arange(start, stop) - sequence.start + sequence.first_bound
        else:
            bound = torch.full((stop - start,), sequence.length)
        hidden = position >= bound.unsqueeze(1)
        order = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
        chosen = order[:, :count].to(torch.int32)
        picks[start:stop, :count] = chosen.masked_fill(position[:count] >= bound.unsqueeze(1), -1)
