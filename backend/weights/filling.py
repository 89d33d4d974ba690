"""Fills a compiled method's weights from a checkpoint: what its graph reads and no more, each element once.

The plan says what is read: a parameter that the graph has whole, and for each derived weight what its recipe slices
out of its sources. First all recipes run on meta tensors to collect the boxes that they need, then one after the other
on what is read. Methods compiled from one model (prefill and decode) share what they have in common.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.weights.checkpoint import Box, Checkpoint, CheckpointError, Stored
from cannopy.backend.weights.pieces import Fetch, Piece
from cannopy.fx_passes.program import InputSpec, WeightEntry

_LOADED: weakref.WeakValueDictionary[Any, torch.nn.Parameter] = weakref.WeakValueDictionary()
"""Weights in memory by checkpoint, recipe and device, for as long as a compiled method has them."""


@dataclass(frozen=True)
class Source:
    """Where the values of one input of the graph come from: ``stored`` in the checkpoint, or ``value``."""

    spec: InputSpec
    stored: Stored | None = None
    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Loading:
    """Fills weights of ``artifact`` on ``device``. ``sources`` by placeholder; ``cast_nz`` as in `WeightBinder`."""

    artifact: Artifact
    checkpoint: Checkpoint
    sources: Mapping[str, Source]
    device: torch.device
    cast_nz: Any = None

    def run(self) -> tuple[dict[str, torch.Tensor], int]:
        """Every parameter, buffer and derived weight that the graph reads, by placeholder, and the bytes that another
        compiled method of the model had already. `CheckpointError` names the tensor that does not fit."""
        wanted = [a.placeholder for a in self.artifact.module.attributes if a.kind != "constant"]
        keys = self._keys()
        values = {n: _LOADED[keys[n]] for n in wanted if keys[n] in _LOADED}
        shared = sum(v.nbytes for v in values.values())
        made: dict[str, torch.Tensor] = dict(values)
        missing = [n for n in wanted if n not in values]
        boxes = self.boxes(missing)
        reads = _Reads(self, boxes)
        for name, value in self._made(missing, reads.fetch, torch.device("cpu")):
            made[name] = _LOADED[keys[name]] = torch.nn.Parameter(self._placed(name, value), requires_grad=False)
        return made, shared

    def boxes(self, wanted: Sequence[str]) -> dict[str, list[Box]]:
        """What the weights ``wanted`` need of each stored parameter, by placeholder, in the order of reading."""
        found: dict[str, list[Box]] = {}

        def note(name: str, box: Box) -> torch.Tensor:
            found.setdefault(name, []).append(box)
            spec = self.sources[name].spec
            return torch.empty([b - a for a, b in box], dtype=spec.dtype, device="meta")

        for _ in self._made(wanted, note, torch.device("meta")):
            pass
        return found

    def _made(self, wanted: Sequence[str], fetch: Fetch, device: torch.device) -> Any:
        """(placeholder, value) of each of ``wanted``, derived ones in the order of the plan; each freed when done."""
        entries = self._needed(wanted)
        uses = Counter(s for e in entries for s in e.sources)
        values: dict[str, torch.Tensor] = {}
        asked = set(wanted)
        with torch.no_grad():
            for name in (n for n in wanted if n in self.sources):
                yield name, _own(self._source(name, fetch, device))
            for entry in entries:
                inputs = [values[s] if s in values else self._source(s, fetch, device) for s in entry.sources]
                try:
                    value = entry.expression(inputs)
                except RuntimeError as e:  # what the asserts of a recipe raise
                    raise CheckpointError(f"weight {entry.name}, built from {', '.join(entry.sources)}: {e}") from e
                uses.subtract(entry.sources)
                values = {n: v for n, v in values.items() if uses[n] > 0}
                if entry.name in asked:
                    value = _own(value)
                    yield entry.name, value
                if uses[entry.name]:
                    values[entry.name] = value

    def _needed(self, wanted: Sequence[str]) -> list[WeightEntry]:
        """The entries of the plan that ``wanted`` are built from, in the order of the plan."""
        needed, found = set(wanted), []
        for entry in reversed(self.artifact.weights):
            if entry.name in needed:
                needed.update(entry.sources)
                found.append(entry)
        return found[::-1]

    def _source(self, name: str, fetch: Fetch, device: torch.device) -> torch.Tensor:
        source = self.sources[name]
        spec = source.spec
        if source.value is not None:
            value = source.value.detach().to(device)
        else:
            value = Piece.of(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta"), fetch)
        return value if spec.view is None else value.view(spec.view)

    def _placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.to(self.device)
        nz = any(w.name == name and w.nz for w in self.artifact.weights)
        found: torch.Tensor = self.cast_nz(value) if nz and self.cast_nz is not None else value
        return found

    def _keys(self) -> dict[str, Any]:
        """What the value of each placeholder depends on."""
        identity, device = self.checkpoint.identity, str(self.device)
        keys: dict[str, Any] = {}
        for name, source in self.sources.items():
            place = _digest(source.value) if source.value is not None else (identity, source.stored)
            keys[name] = place, source.spec.dtype, source.spec.view, device
        for w in self.artifact.weights:
            keys[w.name] = w.recipe, w.nz, tuple(keys[s] for s in w.sources)
        return keys


class _Reads:
    """Reads boxes of stored parameters, each element once where boxes overlap or come twice, and forgets them after
    their last use."""

    def __init__(self, loading: Loading, boxes: Mapping[str, Sequence[Box]]) -> None:
        self._loading = loading
        self._left = {name: Counter(found) for name, found in boxes.items()}
        self._hulls = {name: _hull(found) for name, found in boxes.items()}
        self._kept: dict[tuple[str, Box], torch.Tensor] = {}

    def fetch(self, name: str, box: Box) -> torch.Tensor:
        """The elements of ``box`` of the parameter at placeholder ``name``."""
        hull = self._hulls[name] or box
        if (name, hull) not in self._kept:
            source = self._loading.sources[name]
            assert source.stored is not None  # only these become pieces
            self._kept[name, hull] = self._loading.checkpoint.read(source.stored, hull, source.spec.dtype)
        found = self._kept[name, hull]
        left = self._left[name]
        left[box] -= 1
        if not any(n > 0 for b, n in left.items() if self._hulls[name] or b == box):
            del self._kept[name, hull]
        return found[tuple(slice(a - h, b - h) for (a, b), (h, _) in zip(box, hull, strict=True))].contiguous()


def _hull(boxes: Sequence[Box]) -> Box | None:
    """The box around all of ``boxes`` where that is not more than they are together; None: each is read by itself."""
    distinct = list(dict.fromkeys(boxes))
    hull = tuple((min(a for a, _ in sides), max(b for _, b in sides)) for sides in zip(*distinct, strict=True))
    return hull if elements(hull) <= sum(map(elements, distinct)) else None


def _digest(value: torch.Tensor) -> str:
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def elements(box: Box) -> int:
    """Elements of a box."""
    return math.prod(b - a for a, b in box)


def _own(value: torch.Tensor) -> torch.Tensor:
    """``value``, contiguous, in memory that holds nothing else."""
    value = value.value() if isinstance(value, Piece) else value
    value = value.detach().contiguous()
    return value if value.is_meta or value.untyped_storage().nbytes() == value.nbytes else value.clone()


def check_shapes(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """`CheckpointError` for the first stored parameter that has another shape than the model's."""
    for source in sources.values():
        if source.stored is None:
            continue
        found = checkpoint.shape(source.stored)
        if found != source.spec.shape:
            first = source.stored.tensors[0]
            raise CheckpointError(f"{checkpoint.where(first)}: {source.spec.source} has shape "
                                  f"{list(source.spec.shape)}, the checkpoint's is {list(found)}")

