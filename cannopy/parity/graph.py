"""Parity of a graph as it is between two passes: run op by op, compared with eager in the model's dtype and float64.

Nothing goes through torchair, so a check takes as long as three eager calls. Results and everything that the call
writes (caches, counters) are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cannopy.errors import CannopyError
from cannopy.frontend import outputs
from cannopy.fx_passes.paths import compile_path, parse_path
from cannopy.fx_passes.program import InputSpec, Program
from cannopy.parity.measure import ErrorParity, ParityReport, compare_picks, errors_of
from cannopy.parity.picks import Choice, Pick, Recorder, Replay
from cannopy.parity.reference import all_in_float64, cast_inputs, in_float64


@dataclass(frozen=True)
class Values:
    """What one call gave: floating-point results and written tensors by name, and the choices it made."""

    results: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    choices: list[Choice] = field(default_factory=list)


class GraphParity:
    """Checks programs of one call. ``args`` and ``kwargs`` stay as they are, and so does the model.

    Args:
        model, method, args, kwargs: the call that was captured.
        specs: inputs of the captured program; those that are mutated are compared.

    Raises:
        CannopyError: the model has no weights.
    """

    def __init__(self, model: torch.nn.Module, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 specs: Sequence[InputSpec]) -> None:
        if any(p.is_meta for p in model.parameters()):
            raise CannopyError("the model has no weights (meta device): there is no result to compare",
                               "leave out --offline, or take a size that fits, --size tiny")
        self.model, self.method, self.args, self.kwargs = model, method, args, dict(kwargs)
        self.written = [spec.source for spec in specs if spec.mutated]
        self._exact_model = in_float64(model)
        self._before = self._state(model, args, self.kwargs)
        self._references: dict[bytes, tuple[Values, Values]] = {}

    def check(self, program: Program) -> ParityReport:
        """Run ``program`` and compare. An operation that raises does so here.

        Raises `ReplayError` when the picks of the graph (experts, keys) are not those that the model asks for.
        """
        with torch.no_grad(), Recorder() as recorder:
            ours = self._run(program)
        return self.compare(ours, recorder.picks)

    def compare(self, ours: Values, picks: Sequence[Pick]) -> ParityReport:
        """What a run gave that made ``picks``, next to eager."""
        plain, exact = self._reference(picks)
        errors: list[ErrorParity] = [
            errors_of(name, ours.results[name], plain.results[name], exact.results[name]) for name in exact.results
        ]
        for name in exact.state:
            changed = self._changed(name, ours, plain, exact)
            if changed.any():
                errors.append(errors_of(name, *(_rows(v.state[name])[changed] for v in (ours, plain, exact))))
        return ParityReport(errors, compare_picks("call", plain.choices, exact.choices))

    def _changed(self, name: str, *runs: Values) -> torch.Tensor:
        before = _rows(self._before[name])
        return torch.stack([(_rows(run.state[name]) != before).any(-1) for run in runs]).any(0)

    def _run(self, program: Program) -> Values:
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        found = {s.name: compile_path(s.source)(self.model, args, kwargs).detach() for s in program.inputs}
        owned = {s.name: found[s.name].clone() for s in program.inputs if s.mutated and _in_model(s.source)}
        raw = dict(found)
        for entry in program.weights:
            raw[entry.name] = entry.build([raw[source] for source in entry.sources])
        for spec in program.inputs:
            if spec.view is not None:
                raw[spec.name] = raw[spec.name].view(spec.view)
        names = [node.name for node in program.gm.graph.nodes if node.op == "placeholder"]
        try:
            tensors = program.gm(*(raw[name] for name in names))
            result = outputs.builder(program.output)(list(tensors), self.model, args, kwargs)
            return Values(_results(result), self._state(self.model, args, kwargs))
        finally:
            for name, value in owned.items():
                found[name].copy_(value)

    def _reference(self, picks: Sequence[Pick]) -> tuple[Values, Values]:
        key = b"|".join(f"{p.kind} {p.width} {list(p.indices.shape)}".encode() + p.indices.numpy().tobytes()
                        for p in picks)
        if key not in self._references:
            own = any(map(_in_model, self.written))
            plain = copy.deepcopy(self.model) if own else self.model
            exact = copy.deepcopy(self._exact_model) if own else self._exact_model
            call = copy.deepcopy((self.args, self.kwargs))
            ours = self._eager(plain, *call, picks)
            exact_call = cast_inputs((self.args, self.kwargs), torch.float64)
            with all_in_float64():
                wide = self._eager(exact, *exact_call, picks)
            self._references[key] = (ours, wide)
        return self._references[key]

    def _eager(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
               picks: Sequence[Pick]) -> Values:
        with torch.no_grad(), Replay(picks) as played:
            result = getattr(model, self.method)(*args, **kwargs)
        played.finish()
        return Values(_results(result), self._state(model, args, kwargs), played.choices)

    def _state(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {path: compile_path(path)(model, args, kwargs).detach().clone() for path in self.written}


def _in_model(path: str) -> bool:
    return parse_path(path).root == "self"


def _rows(value: torch.Tensor) -> torch.Tensor:
    rows = value.detach().double()
    return rows.reshape(-1, rows.shape[-1]) if rows.dim() else rows.reshape(1, 1)


def _results(result: Any) -> dict[str, torch.Tensor]:
    """Every floating-point tensor of a result, as rows, by its number."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return {f"result {i}": _rows(leaf) for i, leaf in enumerate(leaves) if leaf.is_floating_point() and leaf.numel()}
