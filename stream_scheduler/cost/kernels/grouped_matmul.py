"""Grouped matmul over the experts of one die.

Every token of the expert-parallel group takes ``top_k`` of ``experts`` targets (zero experts count as targets),
so this die gets rows = tokens * top_k * local_experts / experts. An expert is read when at least one token takes
it; with uniform routing the expected number is E (1 - (1 - k / experts)^tokens), E the local experts.
"""

from __future__ import annotations

from typing import TypeVar, cast

import sympy

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

SOURCE = "operands once; active experts by expectation under uniform routing"

Number = TypeVar("Number", float, sympy.Expr)

_SIZES, (_T, _TOPK, _E, _LOCAL, _K, _N) = sizes(
    "tokens: tokens of the whole expert-parallel group",
    "top_k: experts per token",
    "experts: routing targets of the group, zero experts included",
    "local_experts: experts on this die",
    "k: reduced size",
    "n: columns of each expert's weight",
)


def active_experts(local: Number, total: Number, top_k: Number, tokens: Number) -> Number:
    """Expected number of the ``local`` experts that at least one of ``tokens`` tokens takes."""
    return cast(Number, local * (1 - (1 - top_k / total) ** tokens))


_ROWS = _T * _TOPK * _LOCAL / _E
_ACTIVE = active_experts(_LOCAL, _E, _TOPK, _T)


def _grouped(name: str, dtype: str, x_bytes: float, w_bytes: float) -> Kernel:
    return Kernel(
        name,
        "grouped_matmul",
        f"y[rows of e] = x[rows of e] @ w[e] for each expert e of the die; weights of {w_bytes:g} bytes an element",
        _SIZES,
        SOURCE,
        read={Role.WEIGHTS: _ACTIVE * _K * _N * w_bytes, Role.ACTIVATIONS: _ROWS * _K * x_bytes},
        write={Role.ACTIVATIONS: _ROWS * _N * 2},
        macs=_ROWS * _K * _N,
        mac_dtype=dtype,
        counts={"m": _ROWS / _ACTIVE, "active": _ACTIVE},
        cube=True,
        vector=False,
        contract="npu_grouped_matmul",
        at_most=(("top_k", "experts"), ("local_experts", "experts")),
    )


KERNELS = (
    _grouped("grouped_matmul_bf16", "bf16", 2, 2),
    _grouped("grouped_matmul_int8", "int8", 1, 1),
    _grouped("grouped_matmul_w4a8", "int8", 1, 0.5),
)
