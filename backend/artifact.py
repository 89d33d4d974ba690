"""What one compilation leaves behind: everything a process needs to run it again without capturing the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cannopy.backend.emit import EmittedModule
from cannopy.fx_passes.program import InputSpec, OutputSpec, WeightEntry


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a compilation, computable without capturing the model.

    ``fields`` maps each ingredient (code, config, inputs, …) to its digest and ``key`` covers them all.
    ``details`` splits a field into items, each with a short text or digest, so that a miss can name the item.
    """

    key: str
    fields: Mapping[str, str]
    details: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class CallForm:
    """How the example call was spelt: number of positional arguments and names of keyword arguments.

    The paths of the inputs (``args[0]``, ``kwargs['cache']``) are those of this spelling. ``leaves`` says what was at
    each path (`fx_passes.calls.kinds`).
    """

    positional: int
    keywords: tuple[str, ...]
    leaves: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Artifact:
    """One compiled method.

    ``inputs`` are those that the graph or a weight recipe reads; ``devices`` gives the device type of each by
    placeholder name; ``constants`` are the values at paths of the call that the graph is specialised on;
    ``tensors`` are constants of the graph by get_attr target.
    """

    fingerprint: Fingerprint
    model_class: str
    method: str
    form: CallForm
    module: EmittedModule
    inputs: tuple[InputSpec, ...]
    devices: Mapping[str, str]
    output: OutputSpec
    weights: tuple[WeightEntry, ...]
    constants: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    report: Mapping[str, Any]

    def spec(self, name: str) -> InputSpec:
        """The binding of placeholder ``name``; KeyError if there is none."""
        for s in self.inputs:
            if s.name == name:
                return s
        raise KeyError(name)
