"""Collectives over ``ranks`` dies.

``bytes_per_rank`` is the shard of one rank: what a die gives to an all-gather, gets from a reduce-scatter, and for
all-to-all what it holds before (and after). For all-reduce it is the whole tensor. link_bytes is what leaves the
die: shard (p - 1) for all-gather and reduce-scatter, 2 n (p - 1) / p for all-reduce, n (p - 1) / p for all-to-all.
"""

from __future__ import annotations

import sympy

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, Size, sizes

SOURCE = "HCCL user guide, introduction to the collective algorithms (alpha-beta-gamma model)"
_SIZES, (_P, _N) = sizes(
    Size("ranks", "dies of the group", least=1), "bytes_per_rank: bytes of one rank's shard; all_reduce: of the tensor"
)


def _collective(
    name: str, summary: str, read: sympy.Expr, write: sympy.Expr, link: sympy.Expr, peer: sympy.Expr
) -> Kernel:
    return Kernel(
        name,
        f"collective_{name}",
        summary,
        _SIZES,
        SOURCE,
        read={Role.ACTIVATIONS: read},
        write={Role.ACTIVATIONS: write},
        link_bytes=link,
        counts={"peers": _P - 1, "peer_bytes": peer},
    )


KERNELS = (
    _collective("all_gather", "every die gets the shards of all", _N, _N * _P, _N * (_P - 1), _N / _P),
    _collective("reduce_scatter", "every die gets its shard of the sum", _N * _P, _N, _N * (_P - 1), _N / _P),
    _collective("all_reduce", "every die gets the sum", _N, _N, 2 * _N * (_P - 1) / _P, _N / _P**2),
    _collective("all_to_all", "every die sends a part to each other", _N, _N, _N * (_P - 1) / _P, _N / _P**2),
)
