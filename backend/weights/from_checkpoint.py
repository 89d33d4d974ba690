"""A compiled method whose model is on the meta device gets its weights from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from cannopy.backend.runtime import CompiledModel
from cannopy.backend.torchair import have_npu
from cannopy.backend.weights.checkpoint import Checkpoint, CheckpointError, Stored
from cannopy.backend.weights.devices import nz_cast
from cannopy.backend.weights.filling import Loading, Source, check_shapes
from cannopy.backend.weights.loaded import LoadedWeights
from cannopy.fx_passes.paths import parse_path
from cannopy.fx_passes.program import InputSpec


def load(compiled: CompiledModel, checkpoint: Checkpoint, stored: Mapping[str, Stored]) -> tuple[CompiledModel,
                                                                                                LoadedWeights]:
    """``compiled`` with the weights that its graph reads, on the device of this process, and what loading took.

    ``stored``: where the checkpoint has each parameter and persistent buffer, by its name in the model. Raises
    `CheckpointError` for one that is missing or of another shape; ``compiled`` is then as it was.
    """
    here = torch.device("npu" if have_npu() else "cpu")
    artifact = compiled.artifact
    artifact = replace(artifact, devices={n: here.type if d == "meta" else d for n, d in artifact.devices.items()})
    found = sources(compiled, checkpoint, stored)
    check_shapes(checkpoint, found)
    weights = LoadedWeights(Loading(artifact, checkpoint, found, here, nz_cast()))
    return compiled.filled(artifact, weights), weights


def sources(compiled: CompiledModel, checkpoint: Checkpoint, stored: Mapping[str, Stored]) -> dict[str, Source]:
    """Where the value of every parameter and buffer comes from that the graph or a recipe of ``compiled`` reads."""
    artifact, model = compiled.artifact, compiled.eager
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    arguments = set(artifact.module.arguments)
    found = {}
    for spec in artifact.inputs:
        if spec.kind not in ("parameter", "buffer") or spec.name in arguments:
            continue
        tensor = parse_path(spec.source).resolve(model, (), {})
        found[spec.name] = _source(spec, tensor, names.get(id(tensor), []), model, checkpoint, stored)
    return found


def _source(spec: InputSpec, tensor: torch.Tensor, names: list[str], model: torch.nn.Module, checkpoint: Checkpoint,
            stored: Mapping[str, Stored]) -> Source:
    """``names``: of the tensor in the model; tied parameters have several, a checkpoint has one of them."""
    known = next((stored[n] for n in names if n in stored), None)
    if known is not None and not any(_computed(model, n) for n in names):
        return Source(spec, known)
    if not tensor.is_meta:
        return Source(spec, value=tensor)
    if spec.kind == "parameter" or not any(_computed(model, n) for n in names):
        name = " = ".join(names) or spec.source
        raise CheckpointError(f"{checkpoint.folder} has no tensor for {name}")
    raise CheckpointError(f"{names[0]} is a buffer that the model computes, and it is on the meta device: build the "
                          "model so that only parameters are there")


def _computed(model: torch.nn.Module, name: str) -> bool:
    """Whether ``name`` is a buffer that the model computes itself."""
    module, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(module)._non_persistent_buffers_set
