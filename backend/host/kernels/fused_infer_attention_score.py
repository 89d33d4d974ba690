"""npu_fused_infer_attention_score_v2 on the CPU, and torchair's form of it, whose lengths are tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....fusion_rules.contracts import value_error
from . import _sequences

OP = "npu_fused_infer_attention_score_v2"
RIGHT_DOWN = 3
"""The sparse_mode in which the last query of a request sees all of its keys, each earlier one a key less."""
LATENT, MOST_LATENT_QUERIES = 512, 16
SCORES = 1 << 22
"""Scores [queries, heads, keys] at a time: 16 MiB of fp32."""

Lengths = torch.Tensor | Sequence[int] | None


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    return_softmax_lse: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale · [q|q_rope]·[k|k_rope]ᵀ) · v`` of each request over its own keys.

    query [B,N,S,D] (BNSD, BNSD_BSND), [B,S,N,D] (BSND), [T,N,D] (TND, TND_NTD) or [N,T,D] (NTD_TND); the part of the
    layout behind the line is that of the result. key and value alike with their own heads and rows, or paged,
    [blocks, block size, heads · D], then block_table int32 [requests, blocks]. Each key head serves
    num_query_heads / num_key_value_heads query heads. Lengths count per request; those of packed tensors (T) are
    running sums. sparse_mode 3 hides keys past ``length - q + i`` from query i of q. A query that sees no key gives
    zeros. What the contract wants left out comes in ``unused``. Returns (out, lse): lse is ``log Σ exp(scale · q·k)``
    in fp32, [T,N,1] of packed queries and [B,N,S,1] of others, empty unless asked for. What it is for a query that
    sees no key is not documented: NaN here, so that nothing relies on it. fp32 inside, one rounding. Source: op-plugin
    doc of npu_fused_infer_attention_score_v2.
    """
    of_query, _, of_result = input_layout.partition("_")
    causal = sparse_mode == RIGHT_DOWN
    if causal and atten_mask is not None:
        _demand_triangle(atten_mask)
    paged = block_table is not None
    q = _rows(query, of_query)
    k, v = (_rows(t, "PAGED" if paged else of_query, num_key_value_heads) for t in (key, value))
    if query_rope is not None and key_rope is not None:
        q = torch.cat((q, _rows(query_rope, of_query)), dim=-1)
        k = torch.cat((k, _rows(key_rope, "PAGED" if paged else of_query, num_key_value_heads)), dim=-1)
    packed = "TND" if "T" in of_query else "BSND"
    q_flat, k_flat, v_flat = (t if packed == "TND" and t.dim() == 3 else t.flatten(0, 1) for t in (q, k, v))
    out = torch.zeros((*q_flat.shape[:2], v_flat.shape[-1]), dtype=torch.float32)
    lse = torch.full((*q_flat.shape[:2], 1), float("nan"))
    for one in _requests(q, k, actual_seq_qlen, actual_seq_kvlen, block_table, packed):
        if query.shape[-1] == LATENT:
            _demand_few(one, causal)
        _attend(out, lse, one, q_flat, k_flat, v_flat, softmax_scale, causal)
    result = _laid_out(out.view(*q.shape[:-1], -1), of_query, of_result or of_query)
    if packed == "BSND":
        lse = lse.view(*q.shape[:-1], 1).transpose(1, 2).contiguous()
    return result.to(query.dtype), lse if return_softmax_lse else torch.zeros(0, dtype=torch.float32)


def _rows(tensor: torch.Tensor, layout: str, heads: int = 0) -> torch.Tensor:
    """The tensor as [T,N,D], [B,S,N,D] or, paged, [blocks, rows, N, D]."""
    match layout:
        case "BNSD":
            return tensor.transpose(1, 2).contiguous()
        case "NTD":
            return tensor.transpose(0, 1).contiguous()
        case "PAGED":
            return tensor.reshape(*tensor.shape[:-1], heads, tensor.shape[-1] // heads)
    return tensor


def _laid_out(rows: torch.Tensor, of_query: str, of_result: str) -> torch.Tensor:
    """[T,N,D] or [B,S,N,D] in the layout of the result."""
    swap = {"BNSD": (1, 2), "NTD": (0, 1)}.get(of_result)
    return rows.transpose(*swap).contiguous() if swap else rows.contiguous()


def _requests(q: torch.Tensor, k: torch.Tensor, query_lengths: Lengths, key_lengths: Lengths,
              table: torch.Tensor | None, packed: str) -> Iterator[_sequences.Sequence]:
    of_query, of_keys = (None if n is None else torch.as_tensor(n) for n in (query_lengths, key_lengths))
    if packed == "TND":
        _demand_end(of_query, q.shape[0], "query-lengths")
        if table is None:
            _demand_end(of_keys, k.shape[0], "key-lengths")
    return _sequences.sequences(OP, q, k, of_query, of_keys, table, packed, packed if table is None else "PA_BSND")


def _demand_end(lengths: torch.Tensor | None, rows: int, rule: str) -> None:
    if lengths is None or lengths.numel() == 0 or int(lengths[-1]) != rows:
        raise value_error(OP, rule, f"{None if lengths is None else lengths.tolist()} for {rows} rows")


def _demand_triangle(mask: torch.Tensor) -> None:
    if not torch.equal(mask.bool(), torch.ones(mask.shape, dtype=torch.bool).triu(1)):
        raise value_error(OP, "mask-triangle", "another mask")


def _demand_few(one: _sequences.Sequence, causal: bool) -> None:
    queries = one.stop - one.start
    if not 0 <= queries <= MOST_LATENT_QUERIES or (queries > 1 and not causal):
        raise value_error(OP, "latent-queries", f"{queries} queries in sparse_mode {RIGHT_DOWN if causal else 0}")


def _attend(out: torch.Tensor, lse: torch.Tensor, one: _sequences.Sequence, q: torch.Tensor, k: torch.Tensor,
            v: torch.Tensor, scale: float, causal: bool) -> None:
    """Write the rows of one request into ``out`` [T,N,Dv] and ``lse`` [T,N,1]; q [T,N,D], k [rows,K,D], v [rows,K,Dv].
    """
    if one.length == 0:
        return
    groups = q.shape[1] // k.shape[1]
    keys = k[one.keys].float().permute(1, 2, 0).repeat_interleave(groups, 0)
    values = v[one.keys].float().transpose(0, 1).repeat_interleave(groups, 0)
    step = max(1, SCORES // (q.shape[1] * one.length))
    for start in range(one.start, one.stop, step):
        stop = min(start + step, one.stop)
        scores = torch.matmul(q[start:stop].float().transpose(0, 1), keys) * scale
        if causal:
            bound = torch.arange(start - one.start, stop - one.start) + one.first_bound
            hidden = torch.arange(one.length) >= bound.unsqueeze(1)
            scores = scores.masked_fill(hidden, float("-inf"))
            weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
        else:
            weights = torch.softmax(scores, dim=-1)
        out[start:stop] = torch.matmul(weights, values).transpose(0, 1)
        sums = torch.logsumexp(scores, dim=-1, keepdim=True)
        lse[start:stop] = sums.masked_fill(sums == float("-inf"), float("nan")).transpose(0, 1)
