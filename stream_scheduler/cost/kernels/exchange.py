"""Dispatch and combine: token rows to the dies of their experts and back.

Each token sends ``top_k`` rows; a row of ``hidden`` elements carries 512 bytes of padding and scale. The share
(ranks - 1) / ranks leaves the die.
"""

from __future__ import annotations

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, Size, sizes

SOURCE = "op-plugin documentation of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2"
ROW_PADDING = 512


def _exchange(name: str, summary: str, payload_bytes: int) -> Kernel:
    parameters, (t, k, h, ranks, e) = sizes(
        "tokens: tokens on this die",
        "top_k: experts per token",
        "hidden: hidden size",
        Size("ranks", "dies of the expert-parallel group", least=1),
        f"payload_bytes={payload_bytes}: bytes an element on the link",
    )
    payload = t * k * (h * e + (ROW_PADDING if payload_bytes == 1 else 0))
    local, remote = (t * h * 2, payload) if name == "moe_dispatch" else (payload, t * h * 2)
    return Kernel(
        name,
        "exchange",
        summary,
        parameters,
        SOURCE,
        read={Role.ACTIVATIONS: local},
        write={Role.ACTIVATIONS: remote},
        vector_ops=4 * t * k * h,
        link_bytes=payload * (ranks - 1) / ranks,
        counts={"messages": t * k, "peers": ranks - 1},
    )


KERNELS = (
    _exchange("moe_dispatch", "token rows, quantised, to the dies of their experts", 1),
    _exchange("moe_combine", "expert rows back to the dies of their tokens, weighted and summed", 2),
)
