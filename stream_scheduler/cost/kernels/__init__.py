"""One file per kernel family; each kernel's formulas stand in one place.

Letters follow the literature: T tokens, B sequences, q tokens per sequence and step, S context, H heads.
All counts are for one die.
"""

from __future__ import annotations

from collections.abc import Mapping

from cannopy.stream_scheduler.cost.kernel import Kernel, by_name

from . import (
    attention,
    cache,
    collectives,
    elementwise,
    exchange,
    grouped_matmul,
    indexer,
    matmul,
    mla_prolog,
    quant,
    rotary,
    routing,
    rows,
    sparse_attention,
)

FAMILIES = (
    matmul,
    grouped_matmul,
    mla_prolog,
    indexer,
    sparse_attention,
    attention,
    routing,
    exchange,
    rows,
    quant,
    rotary,
    cache,
    elementwise,
    collectives,
)


def all_kernels() -> Mapping[str, Kernel]:
    """Every kernel by name, family by family."""
    return by_name(kernel for family in FAMILIES for kernel in family.KERNELS)
