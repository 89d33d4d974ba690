"""What experts over dies ask of a product: sizes that dispatch takes, buffers of its communicator, rows of a prompt.

Nothing here needs a graph: the numbers of tokens, experts and dies are enough to refuse a layout before it is built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cannopy.fusion_rules.contracts import check_call
from cannopy.fx_passes.parallel import ParallelError

DISPATCH, COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
MIB = 2**20

DEFAULT_BUFFER_MB = 200
"""MB of a communicator where neither HCCL_BUFFSIZE nor hccl_buffer_size is set (op-plugin doc of dispatch)."""

ROUTED_BYTES = 2**30
"""Most bytes of one buffer of tokens of a prompt that is routed without dispatch; about five of them are alive at once
in a layer. More tokens go in chunks."""

MOST_ROWS = 2**24
"""Most rows of a buffer: their numbers are sorted in float32, which has these exactly."""

MOST_CHUNKS = 16
"""Most chunks of tokens of a prompt in one layer: each has three all-to-alls."""

COMM_ALG = {"atlas-a2": "fullmesh"}
"""comm_alg of dispatch by product; "" (fullmesh_v1 on A3) for others. "" on A2 would follow environment variables."""


@dataclass(frozen=True)
class Traffic:
    """One layer of routed experts over ``ep`` dies: ``tokens`` per die of ``hidden`` features (``itemsize`` bytes
    each), ``top_k`` of ``choices`` experts of which ``experts`` have weights."""

    product: str
    ep: int
    tokens: int
    hidden: int
    top_k: int
    experts: int
    choices: int = 0
    itemsize: int = 2

    @property
    def local(self) -> int:
        """Experts on each die. Raises `ParallelError` where they cannot be divided."""
        if self.experts % self.ep:
            raise ParallelError(f"ep={self.ep}: {self.experts} experts / {self.ep} dies is no whole number; take a "
                                f"divisor of {self.experts}")
        return self.experts // self.ep

    @property
    def comm_alg(self) -> str:
        """comm_alg of dispatch."""
        return COMM_ALG.get(self.product, "")


def dispatch_limits(t: Traffic) -> list[str]:
    """The documented limits of dispatch that ``t`` breaks, in words with its numbers; empty where it is legal."""
    def meta(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    kind = torch.bfloat16 if t.itemsize == 2 else torch.float32
    a2 = t.product == "atlas-a2"
    call = {
        "x": meta(t.tokens, t.hidden, dtype=kind), "expert_ids": meta(t.tokens, t.top_k, dtype=torch.int32),
        "group_ep": "ep", "ep_world_size": t.ep, "ep_rank_id": 0, "moe_expert_num": t.experts,
        "global_bs": t.tokens * t.ep, "comm_alg": t.comm_alg, "group_tp": "ep" if a2 else "",
        "expert_scales": meta(t.tokens, t.top_k, dtype=torch.float32) if a2 else None,
        "copy_expert_num": max(t.choices - t.experts, 0),
    }
    return [str(v) for v in check_call(DISPATCH, (), call, t.product)]


def buffer_mb(t: Traffic) -> int:
    """HCCL_BUFFSIZE in MB (2^20 bytes, rounded up) that dispatch and combine need for the communicator of the experts.

    A3: ``2 (L·T·ep·align512(align32(2H) + 64) + (K + 1)·T·align512(2H))``, A2 (fullmesh):
    ``2 (T·ep·min(L, K)·2H + 2 MB)`` bytes with L experts per die and T tokens per die, 1 for the default of
    shared_expert_num. Source: op-plugin doc of npu_moe_distribute_dispatch_v2 (of 2026; older ones have 44 for 64).
    KeyError for a product without the operator.
    """
    def a2() -> int:
        return 2 * (t.tokens * t.ep * min(t.local, t.top_k) * t.hidden * 2 + 2 * MIB)

    def a3() -> int:
        sent = t.local * t.tokens * t.ep * _align(_align(2 * t.hidden, 32) + 64, 512)
        return 2 * (sent + (t.top_k + 1) * t.tokens * _align(2 * t.hidden, 512))

    return -(-{"atlas-a2": a2, "atlas-a3": a3}[t.product]() // MIB)


def _align(size: int, step: int) -> int:
    return -(-size // step) * step


def rows_per_die(t: Traffic, distinct: bool = True) -> int:
    """Rows that one die may send to one other: ``T·min(K, L)``, all that there can be; ``T·K`` unless a token's experts
    are ``distinct``."""
    return t.tokens * (min(t.top_k, t.local) if distinct else t.top_k)


def routed_bytes(t: Traffic, distinct: bool = True) -> int:
    """Bytes of one buffer of a prompt's tokens: room for `rows_per_die` rows to or from each die."""
    return t.ep * rows_per_die(t, distinct) * t.hidden * t.itemsize


def chunks(t: Traffic, distinct: bool = True) -> list[int]:
    """Tokens of each chunk of a prompt, as equal as can be, so that a buffer keeps to `ROUTED_BYTES` and `MOST_ROWS`.

    Raises `ParallelError` with the arithmetic when that takes more than `MOST_CHUNKS`.
    """
    per_token = routed_bytes(replace(t, tokens=1), distinct)
    most = min(ROUTED_BYTES // per_token, MOST_ROWS // (t.ep * rows_per_die(replace(t, tokens=1), distinct)))
    count = -(-t.tokens // most) if most else t.tokens + 1
    if count > MOST_CHUNKS:
        each = min(t.top_k, t.local) if distinct else t.top_k
        raise ParallelError(
            f"ep={t.ep}: a prompt of {t.tokens} tokens per die needs {t.ep} dies · {each} rows · {t.hidden} features · "
            f"{t.itemsize} bytes = {per_token} bytes per token in each buffer; {MOST_CHUNKS} chunks of "
            f"{ROUTED_BYTES >> 20} MB hold {MOST_CHUNKS * most} tokens. Take shorter prompts per step or fewer dies")
    base, more = divmod(t.tokens, max(count, 1))
    return [base + (i < more) for i in range(count)]
