"""Registration of the CPU kernels with PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch_npu

from ....fusion_rules.contracts import demand
from ....fusion_rules.engine.torchair_ops import torchair_op
from ....stream_scheduler.emission import marks
from .. import target
from ..standin.cann import find_cann
from .add_rms_norm import npu_add_rms_norm
from .attention_update import npu_attention_update
from .fused_infer_attention_score import npu_fused_infer_attention_score_v2
from .grouped_matmul import npu_grouped_matmul
from .interleave_rope import npu_interleave_rope
from .kv_rmsnorm_rope_cache import npu_kv_rmsnorm_rope_cache_v2_functional
from .lightning_indexer import npu_lightning_indexer
from .mla_prolog_v3 import npu_mla_prolog_v3, npu_mla_prolog_v3_functional
from .moe_distribute_combine_v2 import npu_moe_distribute_combine_v2
from .moe_distribute_dispatch_v2 import npu_moe_distribute_dispatch_v2
from .moe_finalize_routing import npu_moe_finalize_routing
from .moe_gating_top_k import npu_moe_gating_top_k
from .moe_init_routing_v2 import npu_moe_init_routing_v2
from .moe_re_routing import npu_moe_re_routing
from .prefetch import npu_prefetch
from .rms_norm import npu_rms_norm
from .rotary_mul import npu_rotary_mul
from .scatter_nd_update import npu_scatter_nd_update, npu_scatter_nd_update_
from .sparse_flash_attention import npu_sparse_flash_attention
from .swiglu import npu_swiglu
from .transpose_batchmatmul import npu_transpose_batchmatmul

Kernel = Callable[..., Any]

KERNELS: tuple[Kernel, ...] = (
    npu_add_rms_norm,
    npu_attention_update,
    npu_fused_infer_attention_score_v2,
    npu_grouped_matmul,
    npu_interleave_rope,
    npu_kv_rmsnorm_rope_cache_v2_functional,
    npu_lightning_indexer,
    npu_mla_prolog_v3,
    npu_mla_prolog_v3_functional,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch_v2,
    npu_moe_finalize_routing,
    npu_moe_gating_top_k,
    npu_moe_init_routing_v2,
    npu_moe_re_routing,
    npu_prefetch,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scatter_nd_update,
    npu_scatter_nd_update_,
    npu_sparse_flash_attention,
    npu_swiglu,
    npu_transpose_batchmatmul,
)
"""The function's name is the op's name."""

TORCHAIR: tuple[Kernel, ...] = (npu_fused_infer_attention_score_v2,)
"""Kernels of ops that torchair defines a second time, in its namespace ``air``; its own CPU kernels only raise."""


class HostKernelsError(RuntimeError):
    """The CPU kernels must not be registered here."""


class _Registration:
    """The process's one registration: PyTorch drops kernels when their Library object dies."""

    libraries: tuple[torch.library.Library, ...] = ()


def register() -> None:
    """Register every kernel for the CPU dispatch key of the libraries `npu` and `air`; later calls do nothing.

    Raises `HostKernelsError` on a machine with an NPU or with CANN.
    """
    if not _Registration.libraries:
        _refuse_on_device()
        library = torch.library.Library("npu", "IMPL", "CPU")
        for kernel in KERNELS:
            library.impl(kernel.__name__, _guarded(kernel))
        graph = torch.library.Library("air", "IMPL", "CPU")
        for kernel in TORCHAIR:
            if torchair_op(kernel.__name__) is not None:
                graph.impl(kernel.__name__, _guarded(kernel), allow_override=True)
        marks.wait()  # torchair defines the op when it is first asked for
        graph.impl("wait_tensor", lambda value, dependency: value, allow_override=True)  # a host runs in order
        _Registration.libraries = (library, graph)


def _refuse_on_device() -> None:
    if torch_npu.npu.is_available():
        raise HostKernelsError("this machine has an NPU: the device runs the npu ops, CPU kernels are for hosts only")
    cann = find_cann()
    if cann is not None:
        raise HostKernelsError(f"CANN is installed ({cann.library}): CPU kernels are for machines without it")


def _guarded(kernel: Kernel) -> Kernel:
    """`kernel` behind the contract of its op on the product of `target.using`, on Atlas A3 outside of that."""

    @wraps(kernel)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        chip = target.current()
        demand(kernel.__name__, args, kwargs, "atlas-a3" if chip is None else chip.name, host=True, graph=False)
        return kernel(*args, **kwargs)

    return guarded
