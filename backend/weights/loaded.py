"""The weights of a compiled method that were loaded from a checkpoint, its model being on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cannopy.backend.guards import GuardError
from cannopy.backend.weights.binder import Change, WeightMemory
from cannopy.backend.weights.filling import Loading


@dataclass(frozen=True)
class LoadReport:
    """What loading took: ``bytes_read`` of the files; ``shard_bytes`` of weights that the graph has now, of which
    ``shared_bytes`` were in memory for another method of the model."""

    bytes_read: int
    shard_bytes: int
    shared_bytes: int


class LoadedWeights:
    """In the place of a `WeightBinder`: reads the weights once; nothing of the model is watched."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        self.memory = WeightMemory(0, 0, 0, 0)
        self.report = LoadReport(0, 0, 0)
        self.device = loading.device

    def bind(self, module: torch.nn.Module) -> None:
        """Read and register every weight of `module`. Raises `checkpoint.CheckpointError`."""
        artifact, checkpoint = self._loading.artifact, self._loading.checkpoint
        before = checkpoint.bytes_read
        values, shared = self._loading.run()
        self._kept = values  # buffers too, for methods that load later
        total = sum(v.nbytes for v in values.values())
        self.report = LoadReport(checkpoint.bytes_read - before, total, shared)
        self.memory = WeightMemory(len(artifact.weights), total - shared, shared, 0)
        for a in artifact.module.attributes:
            if a.kind == "constant":
                value = artifact.tensors[a.placeholder]
                value = value.to(self._loading.device) if value.dim() > 0 else value
                module.register_buffer(a.name, value, persistent=False)
            elif a.kind == "buffer":
                module.register_buffer(a.name, values[a.placeholder].detach(), persistent=False)
            else:
                value = values[a.placeholder]
                kept = value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value, False)
                module.register_parameter(a.name, kept)

    def changed(self) -> Change:
        """Nothing: the files are read once."""
        return "none"

    def keep(self) -> None:
        """Nothing: they are in the files of the checkpoint."""

    def refresh(self, module: torch.nn.Module) -> None:
        """`GuardError`: the model has no values to refresh from."""
        raise GuardError(f"the weights were loaded from {self._loading.checkpoint.folder}; load them again")
