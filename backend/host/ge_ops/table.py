"""Every GE type that the host engine runs."""

from __future__ import annotations

from cannopy.backend.host.ge_ops import (
    binary,
    collectives,
    convolution,
    fused_attention,
    fused_moe,
    fused_norm,
    fused_simple,
    index,
    matmul,
    norm,
    reduce,
    scatter,
    shape,
    unary,
)
from cannopy.backend.host.ge_ops.op import Builder

_FAMILIES = (
    unary,
    binary,
    reduce,
    shape,
    index,
    scatter,
    matmul,
    convolution,
    norm,
    fused_norm,
    fused_simple,
    fused_moe,
    fused_attention,
    collectives,
)


def _merged() -> dict[str, Builder]:
    merged: dict[str, Builder] = {}
    for family in _FAMILIES:
        twice = merged.keys() & family.OPS.keys()
        if twice:
            raise AssertionError(f"GE types with two functions: {sorted(twice)}")
        merged.update(family.OPS)
    return merged


OPS: dict[str, Builder] = _merged()
