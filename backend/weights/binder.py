"""Parameters, buffers and derived weights of a compiled method: bound once, watched cheaply.

A user may replace a parameter (``load_state_dict(assign=True)``), point it at other memory (``.data = …``, ``.to``)
or write into it (``copy_``). The first two rebind the attribute, the third rebuilds the weights derived from it.
A write through ``param.data``, through memory shared with NumPy or another process, and a write to an inference tensor
leave no trace in torch's version counters; after one call `WeightBinder.refresh`.

Methods compiled from one model (prefill and decode) derive many of the same weights. Each is in memory once, for as
long as one of the methods is there: `_DERIVED` knows them by recipe and source memory and keeps none alive.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from cannopy.backend.artifact import Artifact
from cannopy.backend.call_check import tensor_check
from cannopy.backend.guards import GuardError, apply_view, check_tensor
from cannopy.backend.weights.kept import KeptWeights, is_known, missing, note
from cannopy.fx_passes.paths import Path, PathLookupError, parse_path

Change = Literal["none", "values", "tensors"]
_PLUMBING = ("_modules", "_parameters", "_buffers")
Slot = tuple[Any, Any, object]
FormatCast = Callable[[torch.Tensor], torch.Tensor]
_DERIVED: weakref.WeakValueDictionary[Any, torch.nn.Parameter] = weakref.WeakValueDictionary()
_version: Callable[[torch.Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def _layout(t: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return t.dtype, t.shape, t.stride()


@dataclass(frozen=True)
class WeightMemory:
    """What the weights of the plan take besides the model's own, in bytes.

    ``derived``: how many; ``bytes``: of those that were made for this method; ``shared_bytes``: of those that another
    compiled method of the same model had already. A weight that is its source in another shape takes nothing.
    ``source_bytes``: the model's own weights that they were made from, which stay in memory beside them.
    ``mapped_bytes``: of ``bytes``, those that are mapped from the cache folder (`Options.keep_weights`).
    """

    derived: int
    bytes: int
    shared_bytes: int
    source_bytes: int
    mapped_bytes: int = 0


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device


def _is_one_of(value: torch.Tensor, names: Iterable[str], values: Mapping[str, torch.Tensor]) -> bool:
    """Whether a derived weight is one of its sources in another shape."""
    return any(n in values and value.data_ptr() == values[n].data_ptr() for n in names)


def _slots(path: Path, model: torch.nn.Module) -> Iterator[Slot]:
    """(container, key, object) for each step of `path` that goes through a dict or a list."""
    value: Any = model
    for step in path.steps:
        below = step.apply(value)
        key, places = step.key, [value]
        if isinstance(value, torch.nn.Module):
            key = key if step.kind == "attr" else str(key)
            places = [value.__dict__, value._parameters, value._buffers, value._modules]
        elif step.kind == "attr":
            places = [getattr(value, "__dict__", {})]
        for place in places:
            if isinstance(place, list) or (isinstance(place, dict) and key in place and key not in _PLUMBING):
                yield place, key, below
                break
        value = below


def _aliases(model: torch.nn.Module, wanted: set[int]) -> Iterator[Slot]:
    """Every place in the module tree that holds one of the tensors `wanted` (by id): ties must stay ties."""
    for m in model.modules():
        for d in (m._parameters, m._buffers):
            for key, t in d.items():
                if t is not None and id(t) in wanted:
                    yield d, key, t


class WeightValueError(GuardError):
    """The model's weights no longer have a property that the compiled graph relies on."""


class WeightBinder:
    """Keeps the attributes of a generated module equal to the user's weights.

    ``cast_nz`` puts a tensor into FRACTAL_NZ on a device; None where there is no such format. ``store`` has results of
    the weight plan on disk; only the first weights that are bound are looked up there.
    """

    def __init__(self, artifact: Artifact, model: torch.nn.Module, cast_nz: FormatCast | None = None,
                 store: KeptWeights | None = None) -> None:
        self._artifact = artifact
        self._model = model
        self._cast_nz = cast_nz
        self._store = store
        specs = {s.name: s for s in artifact.inputs}
        names = {a.placeholder for a in artifact.module.attributes if a.kind in ("parameter", "buffer")}
        names |= {n for w in artifact.weights for n in w.sources if n in specs}
        self._bound = [specs[n] for n in sorted(names)]
        self._ties: list[frozenset[str]] = []
        self._sources: dict[str, torch.Tensor] = {}
        self.memory, self._first = WeightMemory(0, 0, 0, 0), True

    def bind(self, module: torch.nn.Module) -> None:
        """Register every attribute of `module`. `GuardError` if the model has no such weight or another layout."""
        self._resolve()
        values = self._seen_by_graph()
        with torch.no_grad():
            attributes = {a.placeholder: a for a in self._artifact.module.attributes}
            self._share(values, {n for n, a in attributes.items() if a.kind == "weight"})
            for name, a in attributes.items():
                if a.kind == "constant":
                    module.register_buffer(a.name, self._constant(name), persistent=False)
                elif a.kind == "buffer":
                    module.register_buffer(a.name, values[name].detach(), persistent=False)
                else:
                    value = values[name]
                    if not isinstance(value, torch.nn.Parameter) or a.kind != "weight":
                        value = torch.nn.Parameter(value.detach(), requires_grad=False)
                    module.register_parameter(a.name, value)
        self._watch()

    def _share(self, values: dict[str, torch.Tensor], wanted: set[str]) -> None:
        """Put the derived weights into `values`; one of `wanted` that is in memory already is brought up to date."""
        keys: dict[str, Any] = {name: _place(t) for name, t in values.items()}
        for w in self._artifact.weights:
            keys[w.name] = w.recipe, w.nz, tuple(keys[n] for n in w.sources)
        recipes = {w.name: w for w in self._artifact.weights}
        own = shared = mapped = 0
        store = self._store if self._first else None
        if store is not None:
            store.look_up(values)
        loaded, digests = (store.loaded, store.digests) if store is not None else ({}, {})
        for name, value in self._derive(values, loaded):
            w, key = recipes[name], (keys[name], value.dtype, value.device)
            values[name] = value
            if name not in wanted or value.is_meta or _is_one_of(value, w.sources, values):
                continue
            known = _DERIVED.get(key)
            if known is None or known.is_inference() != value.is_inference():
                known = _DERIVED[key] = torch.nn.Parameter(value.detach(), requires_grad=False)
                own += known.nbytes
                mapped += known.nbytes if name in loaded and known.data_ptr() == loaded[name].data_ptr() else 0
            else:
                shared += known.nbytes if known.data_ptr() != value.data_ptr() else 0
                if name not in digests or not is_known(known, digests[name]):
                    known.copy_(value)
            if name in digests:
                note(known, digests[name])
            values[name] = known
        if self._first:  # later binds find what this method had before
            used = {n for w in recipes.values() for n in w.sources}
            sources = {t.data_ptr(): t.nbytes for n, t in self._sources.items() if n in used}
            self.memory = WeightMemory(len(recipes), own, shared, sum(sources.values()), mapped)
            self._first = False

    def keep(self) -> None:
        """Put the results of the weight plan on disk unless they are there. OSError."""
        store, self._store = self._store, None
        if store is None or store.loaded or not store.digests or self.changed() != "none":
            return
        values = self._seen_by_graph()
        with torch.no_grad():
            store.write(self._plain(values), {n: values[n] for n in self._sources})

    def _plain(self, values: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Each derived weight as it is before a cast to NZ; one that no later recipe reads is dropped."""
        left = Counter(n for w in self._artifact.weights for n in w.sources)
        for w in self._artifact.weights:
            value = w.build([values[n] for n in w.sources])
            yield w.name, value
            if left[w.name]:
                values[w.name] = value

    def changed(self) -> Change:
        """What happened to the weights since they were bound; a few tens of nanoseconds per weight."""
        try:
            if not all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._objects)):
                return "tensors"
        except (KeyError, IndexError):
            return "tensors"
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._pointers or not self._laid_out_as_bound():
            return "tensors"
        if list(map(_version, self._versioned)) != self._versions:
            return "values"
        return "none"

    def _laid_out_as_bound(self) -> bool:
        """Whether dtypes, shapes and strides are as they were (``.data = w.data.t()`` keeps address and version)."""
        fast = self._check is not None and self._check(*self._tensors)  # also depends on the modes of the call
        return fast or list(map(_layout, self._tensors)) == self._layouts

    def refresh(self, module: torch.nn.Module) -> None:
        """Rebuild the derived weights in place, one after the other, from the present values of their sources."""
        values = self._seen_by_graph()
        names = {a.placeholder: a.name for a in self._artifact.module.attributes if a.kind == "weight"}
        with torch.no_grad():
            for name, value in self._derive(values):
                values[name] = value
                if name in names:
                    kept = getattr(module, names[name])
                    if kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)
                    values[name] = kept
        self._versions = list(map(_version, self._versioned))

    def _seen_by_graph(self) -> dict[str, torch.Tensor]:
        return {s.name: apply_view(self._sources[s.name], s, f"`{s.source}`") for s in self._bound}

    def _resolve(self) -> None:
        sources = {}
        for spec in self._bound:
            name = f"`{spec.source}`"
            try:
                value = parse_path(spec.source).resolve(self._model, (), {})
            except PathLookupError as e:
                raise GuardError(f"weight {name}: the model no longer has it; {e}") from e
            sources[spec.name] = check_tensor(value, spec, self._artifact.devices[spec.name], name)
        self._sources = sources
        self._check_ties()

    def _check_ties(self) -> None:
        """Tensors that were one when the model was compiled appear once in the graph; they must still be one."""
        places: dict[int, set[str]] = {}
        parameters = self._model.named_parameters(remove_duplicate=False)
        buffers = self._model.named_buffers(remove_duplicate=False)
        for name, t in itertools.chain(parameters, buffers):
            places.setdefault(id(t), set()).add(name)
        used = {id(t) for t in self._sources.values()}
        ties = [frozenset(names) for i, names in places.items() if i in used and len(names) > 1]
        if not self._ties:
            self._ties = ties
        elif set(ties) != set(self._ties):
            broken = sorted(set(self._ties) ^ set(ties), key=sorted)
            raise GuardError(
                "weights that were tied when the model was compiled are no longer, or others now are:"
                f" {'; '.join(' = '.join(sorted(t)) for t in broken)}; compile again"
            )

    def _derive(
        self, values: dict[str, torch.Tensor], loaded: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Each derived weight in order, ``loaded`` or built; the caller puts it into `values` for later recipes."""
        plan = self._artifact.weights
        wanted = {a.placeholder for a in self._artifact.module.attributes if a.kind == "weight"}
        built = missing(plan, wanted, loaded) if loaded else {w.name for w in plan}
        for w in plan:
            if w.name not in loaded and w.name not in built:
                continue
            try:
                value = loaded[w.name] if w.name in loaded else w.build([values[n] for n in w.sources])
            except RuntimeError as e:  # what the asserts of a recipe raise
                raise WeightValueError(f"weight {w.name}, built from {', '.join(w.sources)}: {e}; compile again") from e
            value = value if w.sources and w.name not in loaded else self._beside(value)
            yield w.name, self._cast_nz(value) if w.nz and self._cast_nz is not None else value

    def _constant(self, target: str) -> torch.Tensor:
        return self._beside(self._artifact.tensors[target])

    def _beside(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, which comes from no weight, on the device of the weights."""
        devices = {t.device for t in self._sources.values()}
        return value.to(next(iter(devices))) if len(devices) == 1 and value.dim() > 0 else value

    def _watch(self) -> None:
        slots: dict[tuple[int, Any], Slot] = {}
        for spec in self._bound:
            for slot in _slots(parse_path(spec.source), self._model):
                slots[id(slot[0]), slot[1]] = slot
        for slot in _aliases(self._model, {id(t) for t in self._sources.values()}):
            slots[id(slot[0]), slot[1]] = slot
        self._containers = [s[0] for s in slots.values()]
        self._keys = [s[1] for s in slots.values()]
        self._objects = [s[2] for s in slots.values()]
        self._tensors = list(self._sources.values())
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._layouts = list(map(_layout, self._tensors))
        self._check = tensor_check(self._tensors)
        derived = {n for w in self._artifact.weights for n in w.sources}
        sources = [t for n, t in self._sources.items() if n in derived]
        self._versioned = [t for t in sources if not t.is_inference()]
        self._held = [t.detach() for t in sources]  # while we have the memory no other tensor can get its address
        self._versions = list(map(_version, self._versioned))
