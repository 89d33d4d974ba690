"""Choosing experts, and bringing rows into and out of the order of the experts on one die."""

from __future__ import annotations

import sympy

from cannopy.stream_scheduler.cost.kernel import Kernel, Role, sizes

_GATE, (_T, _E, _K) = sizes("tokens: tokens on this die", "experts: routing targets", "top_k: experts per token")
GATING = Kernel(
    "moe_gating_top_k",
    "gating",
    "sigmoid or softmax, bias, groups, top-k and renormalisation of the gate's scores",
    _GATE,
    "op-plugin documentation of npu_moe_gating_top_k; scores in FP32, weights and indices out",
    read={Role.ACTIVATIONS: _T * _E * 4},
    write={Role.ACTIVATIONS: _T * _K * 8},
    vector_ops=_T * _E * (8 + sympy.log(_E, 2)),
    counts={"rows": _T},
    contract="npu_moe_gating_top_k",
    at_most=(("top_k", "experts"),),
)

_INIT, (_IT, _IK, _IH, _IB) = sizes(
    "tokens: tokens on this die",
    "top_k: experts per token",
    "hidden: hidden size",
    "bytes=2: bytes an element of the expanded rows",
)
INIT_ROUTING = Kernel(
    "moe_init_routing",
    "row_copy",
    "rows sorted and repeated by expert, quantised when bytes is 1",
    _INIT,
    "op-plugin documentation of npu_moe_init_routing_v2",
    read={Role.ACTIVATIONS: _IT * _IH * 2 + _IT * _IK * 8},
    write={Role.ACTIVATIONS: _IT * _IK * (_IH * _IB + 8)},
    vector_ops=4 * _IT * _IK * _IH,
    counts={"rows": _IT * _IK},
    contract="npu_moe_init_routing_v2",
)

_FINAL, (_FT, _FK, _FH) = sizes(
    "tokens: tokens on this die", "top_k: experts per token", "hidden: hidden size"
)
FINALIZE_ROUTING = Kernel(
    "moe_finalize_routing",
    "row_copy",
    "weighted sum of the experts' rows in the order of the tokens",
    _FINAL,
    "op-plugin documentation of npu_moe_finalize_routing",
    read={Role.ACTIVATIONS: _FT * _FK * (_FH * 2 + 8)},
    write={Role.ACTIVATIONS: _FT * _FH * 2},
    vector_ops=2 * _FT * _FK * _FH,
    counts={"rows": _FT * _FK},
    contract="npu_moe_finalize_routing",
)

KERNELS = (GATING, INIT_ROUTING, FINALIZE_ROUTING)
