"""Captures a model of many like layers from a few of them.

`layer_runs` guesses which layers are alike, `call_trace` writes down what the call does with all layers and with a few,
`layer_proof` compares. When every layer is accounted for, only the small model goes through Dynamo; the program's
`Regions` say what the missing layers are bound to. Otherwise all layers are captured, and the reason is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..fx_passes.collection import no_collection
from ..fx_passes.paths import Path, PathLookupError, Step, parse_path
from ..fx_passes.program import InputSpec, OutputSpec, Program
from ..fx_passes.regions import REGIONS, Copy, Region, Regions, layer_of, renamed
from ..fx_passes.weight_plan import LEAST
from . import experts, layer_runs
from .call_trace import CallTrace, IrregularError, record
from .capture import capture as capture_whole
from .capture import least_of
from .errors import CaptureError
from .layer_proof import Proof, prove
from .layer_runs import LEADING, Run
from .twin import fake_copy, on_meta


@dataclass(frozen=True)
class Small:
    """The model with few layers and what is known of the rest.

    ``names``: its layers -> those of the whole model; ``whole``: the operations of all layers.
    """

    model: nn.Module
    runs: list[Run]
    names: dict[str, str]
    whole: CallTrace
    proof: Proof


@dataclass(frozen=True)
class _Call:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, path: Path) -> Any:
        """The object at ``path`` or None."""
        try:
            return path.resolve(self.model, self.args, self.kwargs)
        except PathLookupError:
            return None


def capture(
    model: nn.Module, method: str = "forward", args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """As `capture.capture`, but like layers are captured once; ``facts["regions"]`` is the program's `Regions`.

    The graph lacks the layers that `Regions` lists until `fx_passes.stamp` has run. Raises `CaptureError`.
    """
    kwargs = dict(kwargs or {})
    model = experts.capturable(model).model
    if on_meta(model):
        model, args, kwargs = fake_copy((model, args, kwargs), FakeTensorMode())
    try:
        with no_collection():
            small = fold(model, method, args, kwargs)
            program = capture_whole(small.model, method, args, kwargs)
            regions = _bind(program, small, _Call(model, args, kwargs))
    except (IrregularError, CaptureError) as e:
        # A fault of the model comes up again where all layers are captured, and names the right one.
        return whole(model, method, args, kwargs, str(e).splitlines()[0])
    layers = sum(len(found) for _, found in layer_runs.lists(model))
    program.facts[REGIONS] = Regions(regions, layers, len(small.names))
    return program


def whole(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str
) -> Program:
    """The program of all layers, with the reason why none was left out."""
    program = capture_whole(model, method, args, kwargs)
    count = sum(len(found) for _, found in layer_runs.lists(model))
    program.facts[REGIONS] = Regions((), count, count, reason)
    return program


def fold(model: nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Small:
    """The model without layers that are proven to do what others do.

    Raises:
        IrregularError: there are none, or the proof fails; names the layer and what differs.
    """
    runs = layer_runs.find(model)
    if not runs:
        raise IrregularError("no run of like layers is long enough")
    small = layer_runs.reduced(model, runs)
    layers: dict[str, nn.Module] = {}
    kept: dict[str, nn.Module] = {}
    names: dict[str, str] = {}
    for path, members in layer_runs.lists(model):
        layers |= {layer_runs.name(path, i): layer for i, layer in enumerate(members)}
        for here, there in enumerate(layer_runs.kept_layers(runs, path, len(members))):
            kept[layer_runs.name(path, here)] = members[there]
            names[layer_runs.name(path, here)] = layer_runs.name(path, there)
    recorded = record(model, method, args, kwargs, layers)
    if recorded.changed:
        raise IrregularError(f"the call changes Python state: {recorded.changed[0]}")
    proof = prove(recorded, record(small, method, args, kwargs, kept), runs, names)
    return Small(small, runs, names, recorded, proof)


def _bind(program: Program, small: Small, call: _Call) -> tuple[Region, ...]:
    """Names inputs, result and provenance of ``program`` as in the whole model; the regions to stamp."""
    here = replace(call, model=small.model)
    placeholders: dict[int, str] = {}
    moved: dict[str, str] = {}
    nodes = program.gm.graph.find_nodes(op="placeholder")
    for i, (spec, node) in enumerate(zip(program.inputs, nodes, strict=True)):
        path = parse_path(spec.source)
        wanted = id(here.get(path))
        wanted = small.proof.renamed.get(wanted, wanted)
        found = _elsewhere(path, wanted, call, small.names)
        if str(found) != spec.source:
            node._rename(input_name(found))
            node.target = node.name
        moved[spec.name] = node.name
        program.inputs[i] = replace(spec, name=node.name, source=str(found))
        placeholders[wanted] = node.name
    program.facts[LEAST] = {moved[name]: value for name, value in program.facts[LEAST].items()}
    program.output = _result(program.output, small, here, call)
    for node in program.gm.graph.nodes:
        inside = str(node.meta.get("module_path", ""))
        if (there := renamed(inside, small.names)) != inside:
            node.meta["module_path"] = there
            node.meta["layer"] = layer_of(there)
    program.gm.recompile()
    specs = {s.name: s for s in program.inputs}
    regions = tuple(
        _region(run, units, small, placeholders, specs, call)
        for run, units in zip(small.runs, small.proof.units, strict=True)
    )
    _check_memory(regions, specs, call)
    return regions


def input_name(path: Path) -> str:
    """The name of the placeholder of ``path``, as `capture` gives it."""
    return re.sub(r"\W+", "_", str(path)).strip("_")


def _result(output: OutputSpec, small: Small, here: _Call, call: _Call) -> OutputSpec:
    def leaf(kind: str, value: Any) -> tuple[str, Any]:
        if kind not in ("source", "view") or value == "self":
            return kind, value
        path = parse_path(value if kind == "source" else value[0])
        found = str(_elsewhere(path, id(here.get(path)), call, small.names))
        return kind, found if kind == "source" else (found, *value[1:])

    return replace(output, leaves=tuple(leaf(kind, value) for kind, value in output.leaves))


def _region(
    run: Run, units: Mapping[int, Mapping[int, int]], small: Small, placeholders: Mapping[int, str],
    specs: Mapping[str, InputSpec], call: _Call,
) -> Region:
    def names(number: int) -> list[str]:
        return [layer_runs.name(run.path, i) for i in run.unit(number)]

    bound = {}
    for template, first in units[1].items():
        if (template in placeholders) != (first in placeholders):
            raise IrregularError(f"{names(2)[0]} and {names(1)[0]} are captured with different inputs")
        if template in placeholders:
            bound[template] = placeholders[first]
    copies = []
    for unit in range(LEADING, run.units - 1):
        prefixes = dict(zip(names(2), names(unit), strict=True))
        inputs = {
            placeholders[key]: _spec(specs[placeholders[key]], units[unit][key], call, prefixes) for key in bound
        }
        least = {name: least_of(spec, call.get(parse_path(spec.source))) for name, spec in inputs.items()}
        copies.append(Copy(prefixes, inputs, least))
    order = [s.layer for s in small.whole.segments]
    stop = order.index(names(2)[-1])
    after = set(small.names.values()) & {layer for layer in order[stop + 1 :] if layer is not None}
    early = {ref[1] for s in small.whole.segments[: stop + 1] for ref in s.reads if ref[0] == "input"}
    return Region(
        run.path, tuple(names(1)), tuple(names(2)), tuple(n for n in order if n is not None and n in after),
        shift={first: placeholders[template] for template, first in bound.items()},
        later=frozenset(name for key, name in placeholders.items() if key not in early),
        copies=tuple(copies),
    )  # fmt: skip


def _spec(template: InputSpec, wanted: int, call: _Call, prefixes: Mapping[str, str]) -> InputSpec:
    path = _elsewhere(parse_path(template.source), wanted, call, prefixes)
    tensor = call.get(path)
    if (tuple(tensor.shape), tensor.stride(), tensor.dtype) != (template.shape, template.stride, template.dtype):
        raise IrregularError(f"{path} has another shape, layout or type than {template.source}")
    return replace(template, name=input_name(path), source=str(path))


def _elsewhere(path: Path, wanted: int, call: _Call, names: Mapping[str, str]) -> Path:
    """The path of the object ``wanted`` (by id), which differs from ``path`` in an index at most.

    ``names`` (layer -> layer) hint at the index.
    """
    if id(call.get(path)) == wanted:
        return path
    for i, step in enumerate(path.steps):
        if isinstance(step.key, int) and not isinstance(step.key, bool):
            container = call.get(Path(path.root, path.steps[:i]))
            for index in dict.fromkeys([*_hints(step.key, names), *_indices(container)]):
                found = Path(path.root, (*path.steps[:i], Step(step.kind, index), *path.steps[i + 1 :]))
                if id(call.get(found)) == wanted:
                    return found
    raise IrregularError(f"no access path like {path} leads to the tensor that another layer has there")


def _hints(key: int, names: Mapping[str, str]) -> Iterator[int]:
    for a, b in names.items():
        if layer_of(a) == key and (index := layer_of(b)) is not None:
            yield index


def _indices(container: Any) -> Sequence[int]:
    return range(len(container)) if isinstance(container, list | tuple | nn.ModuleList | nn.Sequential) else ()


def _check_memory(regions: Sequence[Region], specs: Mapping[str, InputSpec], call: _Call) -> None:
    """Tensors of missing layers must not overlap others that the call writes: capture would have refused that."""
    copies = [spec for region in regions for copy in region.copies for spec in copy.inputs.values()]
    holders: dict[int, list[InputSpec]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for spec in (*specs.values(), *copies):
        tensors[spec.source] = call.get(parse_path(spec.source))
        holders.setdefault(tensors[spec.source].untyped_storage()._cdata, []).append(spec)
    missing = {spec.source for spec in copies}
    for group in holders.values():
        extents = sorted((*_extent(tensors[s.source]), s.source, s.mutated) for s in group)
        for (_, end, a, a_written), (start, _, b, b_written) in pairwise(extents):
            if start < end and tensors[a] is not tensors[b] and (a_written or b_written) and missing & {a, b}:
                raise IrregularError(f"{a} and {b} overlap in memory, and one is written")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First element of its storage that ``tensor`` uses, and the one behind the last, in bytes."""
    last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + (last if tensor.numel() else -1) + 1) * tensor.element_size()
