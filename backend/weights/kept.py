"""Results of the weight plan of one entry, kept on disk under the values that they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cannopy.backend.artifact import Artifact
from cannopy.backend.cache import tensors_file, weight_sets
from cannopy.fx_passes.program import WeightEntry

_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Derived weights in memory -> digest of what they were made from, and their version then."""


class KeptWeights:
    """The sets of ``entry``. One look-up per compiled method, with the weights that it binds first."""

    def __init__(self, artifact: Artifact, entry: Path) -> None:
        self._artifact = artifact
        self._entry = entry
        self.digests: dict[str, str] = {}
        """Of each derived weight, by its name; empty where a model has no values."""
        self.loaded: dict[str, torch.Tensor] = {}

    def look_up(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fill `digests` and `loaded` for sources with ``values``, by placeholder."""
        plan = self._artifact.weights
        sources = {n: values[n] for w in plan for n in w.sources if n in values}
        if not plan or any(t.is_meta for t in sources.values()) or len({t.device for t in sources.values()}) > 1:
            return
        self.digests = self._digests(sources)
        self.loaded = weight_sets.load(self._entry, self._set_digest())

    def write(self, derived: Iterator[tuple[str, torch.Tensor]], sources: Mapping[str, torch.Tensor]) -> None:
        """Write the set that was not there; ``derived`` gives the weights of the plan. OSError.

        A weight that is its source in another shape is not written, nor a scalar or what no file can hold.
        """
        wanted = {a.placeholder for a in self._artifact.module.attributes if a.kind == "weight"}
        wanted &= {w.name for w in self._artifact.weights if w.sources}
        memory = {t.untyped_storage().data_ptr() for t in sources.values()}
        chosen = ((n, t) for n, t in derived if n in wanted and t.dim() and tensors_file.storable(t)
                  and t.untyped_storage().data_ptr() not in memory)
        weight_sets.publish(self._entry, self._set_digest(), chosen, sorted(wanted))

    def _digests(self, sources: Mapping[str, torch.Tensor]) -> dict[str, str]:
        found = tensors_file.digests(sources)
        for w in self._artifact.weights:
            found[w.name] = _sha([w.recipe, str(w.nz), *(found[n] for n in w.sources)])
        return {w.name: found[w.name] for w in self._artifact.weights}

    def _set_digest(self) -> str:
        return _sha([self._artifact.fingerprint.key, *(f"{n}={d}" for n, d in self.digests.items())])


def missing(plan: Sequence[WeightEntry], wanted: set[str], loaded: Mapping[str, object]) -> set[str]:
    """The weights that have to be derived for ``wanted`` when ``loaded`` are there."""
    needed = wanted - set(loaded)
    for w in reversed(plan):
        if w.name in needed:
            needed.update(n for n in w.sources if n not in loaded)
    return needed


def is_known(weight: torch.Tensor, digest: str) -> bool:
    """Whether ``weight`` was made from what ``digest`` stands for, and not written since."""
    return not weight.is_inference() and _KNOWN.get(weight) == (digest, weight._version)


def note(weight: torch.Tensor, digest: str) -> None:
    """``weight`` has the value that ``digest`` stands for."""
    if not weight.is_inference():
        _KNOWN[weight] = digest, weight._version


def _sha(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
