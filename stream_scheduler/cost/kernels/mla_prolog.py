"""Everything before latent attention in one kernel, and the same for the indexer.

MLA prolog: c_q = norm(x W_DQ), q = c_q W_UQ, q_nope W_UK, [c_kv | k_r] = x W_DKV, norms, rotary, cache write.
MACs per token W = d L + d (R + P) + L H (Dn + P) + H Dn R with d hidden, L q rank, R latent rank, P rotary part,
Dn nope part, H heads; each weight is read once. DeepSeek-V3.2: 61 M a token.
"""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "op-plugin documentation of npu_mla_prolog_v3; weights of the model's own projections"

_SIZES, (_T, _D, _L, _H, _R, _P, _DN, _DOWN, _UP, _UK, _C) = sizes(
    "tokens: tokens on this die",
    "hidden: hidden size",
    "q_rank: rank of the query down-projection",
    "heads: query heads on this die",
    "rank=512: rank of the latent",
    "rope=64: rotary part of a head",
    "nope=128: other part of a head",
    "down_bytes=2: bytes an element of W_DQ and W_DKV",
    "up_bytes=2: bytes an element of W_UQ",
    "uk_bytes=2: bytes an element of W_UK",
    "cache_bytes=2: bytes an element of the latent cache",
)
_DOWN_SIZE = _D * _L + _D * (_R + _P)
_UP_SIZE = _L * _H * (_DN + _P)
_UK_SIZE = _H * _DN * _R

MLA_PROLOG = Kernel(
    "mla_prolog",
    "mla_prolog",
    "query and latent projections, norms, rotary and cache write of MLA (v2 and v3)",
    _SIZES,
    SOURCE,
    read={
        Role.WEIGHTS: _DOWN_SIZE * _DOWN + _UP_SIZE * _UP + _UK_SIZE * _UK,
        Role.ACTIVATIONS: _T * _D * _DOWN,
    },
    write={Role.ACTIVATIONS: _T * _H * (_R + _P) * 2, Role.CACHE: _T * (_R + _P) * _C},
    macs=_T * (_DOWN_SIZE + _UP_SIZE + _UK_SIZE),
    vector_ops=_T * (4 * _L + 4 * _R + 6 * _P + 6 * _H * _P),
    counts={"m": _T},
    cube=True,
    contract="npu_mla_prolog_v3",
)

_IX, (_IT, _ID, _IL, _IH, _IDIM, _IUP, _IDOWN) = sizes(
    "tokens: tokens on this die",
    "hidden: hidden size",
    "q_rank: rank of the query down-projection",
    "heads=64: heads of the indexer",
    "dim=128: size of a head of the indexer",
    "up_bytes=2: bytes an element of the query projection",
    "down_bytes=2: bytes an element of the key and weight projections",
)
_QUERY = _IL * _IH * _IDIM
_KEY = _ID * _IDIM + _ID * _IH

INDEXER_PROLOG = Kernel(
    "indexer_prolog",
    "mla_prolog",
    "query, key and head-weight projections of the lightning indexer with norm and rotary",
    _IX,
    "projections of DeepSeek-V3.2's indexer: 13.96 M MACs a token",
    read={Role.WEIGHTS: _QUERY * _IUP + _KEY * _IDOWN, Role.ACTIVATIONS: _IT * (_IL + _ID) * 2},
    write={Role.ACTIVATIONS: _IT * (_IH * _IDIM + _IH) * 2, Role.CACHE: _IT * _IDIM * 2},
    macs=_IT * (_QUERY + _KEY),
    vector_ops=_IT * (6 * _IH * _IDIM / 2 + 8 * _IDIM),
    counts={"m": _IT},
    cube=True,
)

KERNELS = (MLA_PROLOG, INDEXER_PROLOG)
