"""Put the host engine in the place of torchair's GE session, only where there is no CANN and no NPU."""

from __future__ import annotations

from typing import Any

from cannopy.backend.host import target


class CannPresentError(RuntimeError):
    """Real CANN was found, so nothing was replaced."""


def activate() -> None:
    """Make torchair run lowered GE graphs on the CPU. Idempotent.

    Replaces in torchair ``initialize_graph_engine`` (nothing to initialise), ``TorchNpuGraph`` (`HostGraph`),
    ``get_registered_ir_def`` (every IR known, names not validated) and ``check_cann_compat`` (compatible), and
    registers the CPU kernels of the npu ops. Raises CannPresentError, with nothing replaced, where real CANN or an
    NPU is present.
    """
    _refuse_on_device()
    from torch_npu.dynamo import torchair as _lazy_torchair  # makes the plain name importable

    from cannopy.backend.host import kernels
    from cannopy.backend.host.engine import HostGraph

    _lazy_torchair.CompilerConfig  # noqa: B018 the import is lazy; this runs it
    from torchair._ge_concrete_graph import compat_ir
    from torchair.core import _backend, _torchair

    kernels.register()
    target.install()
    if _backend.TorchNpuGraph is HostGraph:
        return
    target.replace_everywhere("initialize_graph_engine", _backend.initialize_graph_engine, _no_engine_to_initialize)
    target.replace_everywhere("TorchNpuGraph", _backend.TorchNpuGraph, HostGraph)
    _torchair.get_registered_ir_def = _every_ir_is_known
    _torchair.check_cann_compat = _everything_is_compatible
    compat_ir.is_cann_compat.cache_clear()


def is_active() -> bool:
    """Whether `activate` has been done in this process."""
    import sys

    backend = sys.modules.get("torchair.core._backend")
    graph = getattr(backend, "TorchNpuGraph", None)
    return getattr(graph, "is_host_engine", False) is True


def _refuse_on_device() -> None:
    from cannopy.backend.host.standin import real_cann_present

    if real_cann_present():
        raise CannPresentError(
            "the host engine is for machines without CANN, and CANN is installed here; "
            "nothing was replaced, compiled graphs run on the device"
        )
    import torch

    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        raise CannPresentError("the host engine is for machines without an NPU, and torch.npu.is_available() is True")


def _no_engine_to_initialize(global_compile_options: dict[str, str] | None = None) -> None:
    return None


def _every_ir_is_known(op_type: str) -> tuple[str, list[Any], list[Any], list[Any]]:
    return ("SUCCESS", [], [], [])


def _everything_is_compatible(op_type: str, optional_inputs: tuple[str, ...], optional_attrs: tuple[str, ...]) -> str:
    return ""
