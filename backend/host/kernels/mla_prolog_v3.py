"""npu_mla_prolog_v3 and its functional twin on the CPU, unquantised."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch_npu

from ....fusion_rules.contracts import value_error
from . import _numerics

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
OP = "npu_mla_prolog_v3"


def npu_mla_prolog_v3(
    token_x: torch.Tensor,
    weight_dq: torch.Tensor,
    weight_uq_qr: torch.Tensor,
    weight_uk: torch.Tensor,
    weight_dkv_kr: torch.Tensor,
    rmsnorm_gamma_cq: torch.Tensor,
    rmsnorm_gamma_ckv: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    *,
    cache_index: torch.Tensor | None = None,
    actual_seq_len: torch.Tensor | None = None,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0,
    kc_scale: float = 1.0,
    **quantisation: Any,
) -> Outputs:
    """Queries of absorbed multi-head latent attention, and the write of the latent and rope caches in place.

    token_x [T,He] or [B,S,He]. ``cq = rms(x·W_dq)·αq``; ``q = cq·W_uq_qr`` per head [D | Dr];
    query ``[..,N,Hckv] = q[:D]·W_uk``; query_rope ``[..,N,Dr] = rope(q[D:])``; ``[ckv | kr] = x·W_dkv_kr``;
    kv_cache ← ``rms(ckv)·αkv``; kr_cache ← ``rope(kr)``, at the rows cache_index. rope takes interleaved pairs and
    returns them de-interleaved. Returns (query, query_rope, –, query_norm [..,Hcq] if query_norm_flag, –); the
    dashes are placeholders of the unquantised case.

    Rounding, as in the operator's type table (MLAPType of mla_prolog_comm.h): every matmul accumulates in fp32 and
    ends in bf16; norm and rope compute in fp32 on those and end in bf16.
    Source: op-plugin doc of npu_mla_prolog_v3. Quantised forms are refused by the host clauses of the contract.
    """
    x = token_x.reshape(-1, token_x.shape[-1])
    sin, cos = (t.reshape(-1, t.shape[-1]) for t in (rope_sin, rope_cos))
    cq, _ = _numerics.rms(_numerics.matmul(x, weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    cq = (cq * qc_qr_scale).to(x.dtype)
    query, query_rope = _queries(cq, weight_uq_qr, weight_uk, cos, sin)
    latent = weight_uk.shape[2]
    down = _numerics.matmul(x, weight_dkv_kr)
    ckv, _ = _numerics.rms(down[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
    slots = _slots(cache_mode, cache_index, actual_seq_len, token_x, kv_cache)
    _store(kv_cache, slots, (ckv * kc_scale).to(x.dtype), cache_mode)
    _store(kr_cache, slots, _rope(down[:, latent:], cos, sin), cache_mode)
    lead = token_x.shape[:-1]
    unused = torch.zeros(_placeholder_size(), dtype=torch.float32)
    norm = (
        cq.view(*lead, cq.shape[1]) if query_norm_flag else torch.zeros(_placeholder_size(), dtype=weight_uq_qr.dtype)
    )
    return (
        query.view(*lead, *query.shape[1:]),
        query_rope.view(*lead, *query_rope.shape[1:]),
        unused,
        norm,
        unused.clone(),
    )


def npu_mla_prolog_v3_functional(
    *args: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`npu_mla_prolog_v3` on copies of the two caches (arguments 9 and 10), which follow the five results."""
    caches = args[9].clone(), args[10].clone()
    operands: tuple[Any, ...] = (*args[:9], *caches)
    return (*npu_mla_prolog_v3(*operands, **kwargs), *caches)


def _queries(
    cq: torch.Tensor, weight_uq_qr: torch.Tensor, weight_uk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries [T,N,Hckv] and their rope parts [T,N,Dr] from the normalised latent [T,Hcq]."""
    heads, nope, _ = weight_uk.shape
    q = _numerics.matmul(cq, weight_uq_qr).unflatten(1, (heads, -1))
    query = _numerics.matmul(q[..., :nope].transpose(0, 1), weight_uk).transpose(0, 1)
    return query.contiguous(), _rope(q[..., nope:], cos.unsqueeze(1), sin.unsqueeze(1))


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return _numerics.rotate_half(_numerics.deinterleave(x), cos, sin).to(x.dtype)


def _placeholder_size() -> int:
    """Length of an unused output: 0 since CANN 8.5.0.alpha003, before it 1 (the meta function asks the same)."""
    return 0 if torch_npu.npu.utils._is_gte_cann_version("8.5.0.alpha003", "CANN") else 1


def _slots(
    mode: str,
    cache_index: torch.Tensor | None,
    actual_seq_len: torch.Tensor | None,
    token_x: torch.Tensor,
    kv_cache: torch.Tensor,
) -> torch.Tensor:
    """The cache row of each token. `ContractError` for one outside the cache, which the device would write anyway."""
    if mode in ("BSND", "TND") or cache_index is None:
        return torch.arange(token_x.numel() // token_x.shape[-1])
    blocks, size = kv_cache.shape[:2]
    if mode in ("PA_BSND", "PA_NZ"):
        slots, limit = cache_index.reshape(-1), blocks * size
        bad = (slots < 0) | (slots >= limit)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise value_error(OP, "cache-index-range", f"{int(slots[at])} for token {at}, {limit} rows")
        return slots
    return _block_slots(cache_index.reshape(-1), _lengths(actual_seq_len, token_x), blocks, size)


def _lengths(actual_seq_len: torch.Tensor | None, token_x: torch.Tensor) -> list[int]:
    """Tokens of each sequence, from the running sums of packed tokens or from [B,S,He]."""
    if actual_seq_len is None:
        return [token_x.shape[0]] if token_x.dim() == 2 else [token_x.shape[1]] * token_x.shape[0]
    ends = [0, *actual_seq_len.tolist()]
    lengths = [b - a for a, b in pairwise(ends)]
    if min(lengths, default=0) < 0 or ends[-1] != token_x.shape[0]:
        raise value_error(OP, "seq-len-prefix", f"{ends[1:]} for {token_x.shape[0]} tokens")
    return lengths


def _block_slots(table: torch.Tensor, lengths: list[int], blocks: int, size: int) -> torch.Tensor:
    """Rows for the PA_BLK modes, whose cache_index names one block per `size` tokens of each sequence."""
    needed = sum(-(-n // size) for n in lengths)
    bad = (table < 0) | (table >= blocks)
    if table.numel() != needed or bool(bad.any()):
        found = f"{table.tolist()} for sequences of {lengths} tokens, {blocks} blocks of {size}"
        raise value_error(OP, "block-index-range", found)
    parts, first = [torch.empty(0, dtype=torch.int64)], 0
    for length in lengths:
        position = torch.arange(length)
        parts.append(table[first + position // size] * size + position % size)
        first += -(-length // size)
    return torch.cat(parts)


def _store(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, mode: str) -> None:
    """Write rows [T,D]. In the NZ modes a block is physically [D/16, block size, 16]."""
    width = rows.shape[-1]
    if mode in ("PA_NZ", "PA_BLK_NZ"):
        blocks, size = cache.shape[:2]
        tiles = cache.view(blocks, width // 16, size, 16)
        tiles[slots // size, :, slots % size, :] = rows.view(-1, width // 16, 16)
    else:
        cache.view(-1, width)[slots] = rows
