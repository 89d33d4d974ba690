"""Devices of this process: where weights and arguments of an artifact are, the cast to NZ, tracing without weights."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from cannopy.backend import torchair
from cannopy.backend.artifact import Artifact
from cannopy.backend.cache.text import DEVICE
from cannopy.backend.runtime import GeneratedModule
from cannopy.backend.weights.binder import FormatCast
from cannopy.fx_passes.paths import PathLookupError, compile_path

_NZ = 29
"""FRACTAL_NZ in CANN's format enumeration."""


def placed(artifact: Artifact, model: torch.nn.Module) -> Artifact:
    """`artifact` for the devices of this process; it may have been compiled without weights, or on a host."""
    here = "npu" if torchair.have_npu() else "cpu"
    meta = any(p.is_meta for p in model.parameters())
    owned = {s.name: s.source for s in artifact.inputs if meta and s.kind in ("parameter", "buffer")}

    def device(name: str) -> str:
        if name in owned:  # buffers may have values where parameters have none
            with contextlib.suppress(PathLookupError):
                return str(compile_path(owned[name])(model, (), {}).device.type)
        return "meta" if meta else here

    return replace(artifact, devices={n: device(n) if d == DEVICE else d for n, d in artifact.devices.items()})


def on_meta(generated: GeneratedModule, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, on the meta device as soon as a weight is there: a graph is traced on one device."""
    if not any(p.is_meta for p in generated.instance.parameters()):
        return tensors
    generated.instance.to("meta")
    return [t.to("meta") for t in tensors]


def nz_cast() -> FormatCast | None:
    """The cast to FRACTAL_NZ on a device; a host has no such format."""
    if not torchair.have_npu():
        return None
    import torch_npu

    def cast(t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch_npu.npu_format_cast(t, _NZ)
        return result

    return cast
