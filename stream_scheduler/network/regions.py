"""Where an expert-written model marks SuperKernel regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from cannopy.stream_scheduler.simulator import Task

FUSED = frozenset({
    "int8_matmul", "w4a8_matmul", "bf16_matmul", "batch_matmul", "grouped_matmul_bf16", "grouped_matmul_int8",
    "grouped_matmul_w4a8",
    "mla_prolog", "fused_infer_attention_mla", "fused_infer_attention_mla_int8", "fused_infer_attention_gqa",
    "sparse_flash_attention", "lightning_indexer", "lightning_indexer_int8",
    "moe_gating_top_k", "dequant_swiglu_quant", "swiglu", "dynamic_quant", "add_rms_norm",
    "rms_norm", "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
})
"""Kernels that fuse into a SuperKernel: AscendC kernels and the collectives that torchair names (dispatch and combine
are not among them)."""


def mark_super_kernels(tasks: Iterable[Task]) -> list[Task]:
    """Consecutive tasks of one stream with one core limit form a region; a kernel that does not fuse ends it."""
    counts: dict[str, int] = {}
    previous: dict[str, Task] = {}
    marked = []
    for task in tasks:
        before = previous.get(task.stream)
        fuses = task.load.kernel in FUSED
        fresh = before is None or before.load.kernel not in FUSED or before.cores != task.cores
        if fuses and fresh:
            counts[task.stream] = counts.get(task.stream, 0) + 1
        previous[task.stream] = task
        name = f"{task.stream}_{counts[task.stream]}" if fuses else None
        marked.append(dataclasses.replace(task, super_kernel=name))
    return marked
