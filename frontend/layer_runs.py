"""Finds runs of layers that look alike, and makes models in which most of such layers are missing.

What looks alike is only a guess from classes, sizes and attributes; `regions` proves it before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

LONGEST_PERIOD = 8
LEADING = 3
"""Units that are kept at the start of a run: one whose neighbour may be another kind, and two that are compared."""
FEWEST_UNITS = LEADING + 1 + 2
"""With fewer units, the proof costs more than it saves."""

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOOKKEEPING = frozenset({"_modules", "_parameters", "_buffers"})


@dataclass(frozen=True)
class Run:
    """Layers ``start`` to ``start + period * units`` of the list ``path`` (dotted), alike from unit to unit."""

    path: str
    start: int
    period: int
    units: int

    def unit(self, number: int) -> range:
        """Indices of the layers of one unit."""
        first = self.start + number * self.period
        return range(first, first + self.period)

    @property
    def dropped(self) -> range:
        """Indices of the layers that the small model does not have."""
        return range(self.unit(LEADING).start, self.unit(self.units - 1).start)


def name(path: str, index: int) -> str:
    """The dotted name of layer ``index`` of the list ``path``."""
    return f"{path}.{index}" if path else str(index)


def lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """The outermost lists of ``model`` with enough entries, by dotted path; each list once."""

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, nn.ModuleList | nn.Sequential) and list(module._modules) == [
            str(i) for i in range(len(module))
        ]:
            if len(module) >= FEWEST_UNITS:
                yield path, module
            return
        for key, child in module._modules.items():
            if child is not None:
                yield from visit(child, f"{path}.{key}" if path else key)

    seen: set[int] = set()
    yield from visit(model, "")


def find(model: nn.Module) -> list[Run]:
    """The runs of ``model`` in the order of its lists."""
    found = []
    for path, layers in lists(model):
        kinds: dict[Any, int] = {}
        modules = list(layers)
        rows = [_rows(layer) for layer in modules]
        counting = _counting(rows)
        marks = [kinds.setdefault(tuple(v for k, v in row.items() if k not in counting), len(kinds)) for row in rows]
        if len({id(m) for m in modules}) == len(modules):
            found += [Run(path, *where) for where in periodic(marks)]
    return found


def periodic(marks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of stretches of ``marks`` that repeat at least `FEWEST_UNITS` times, left to right.

    Where several periods fit, the one that leaves out most.
    """
    found = []
    at = 0
    while at < len(marks):
        best = (0, 0, 0)
        for period in range(1, min(LONGEST_PERIOD, len(marks) - at) + 1):
            end = at + period
            while end < len(marks) and marks[end] == marks[end - period]:
                end += 1
            repeats = (end - at) // period
            if repeats >= FEWEST_UNITS:
                best = max(best, ((repeats - LEADING - 1) * period, -period, repeats))
        if best[0]:
            found.append((at, -best[1], best[2]))
            at += -best[1] * best[2]
        else:
            at += 1
    return found


Rows = dict[tuple[str, str], Any]


def _rows(layer: nn.Module) -> Rows:
    """What may tell layers apart, by submodule and name."""
    rows: Rows = {}
    for path, module in layer.named_modules():
        rows[path, "type"] = (path, type(module))
        for held in (module._parameters, module._buffers):
            for key, t in held.items():
                rows[path, key] = (key, None if t is None else (t.shape, t.stride(), t.dtype, t.device))
        for key, value in module.__dict__.items():
            if key in _HOOKS:
                rows[path, key] = id(value) if value else 0
            elif isinstance(value, _PLAIN):
                rows[path, key] = (key, repr(value)) if isinstance(value, float | complex) else (key, value)
            elif key not in _BOOKKEEPING and not isinstance(value, torch.Tensor | nn.Module):
                rows[path, key] = (key, type(value))
    return rows


def _counting(layers: Sequence[Rows]) -> set[tuple[str, str]]:
    """Names of the numbers that grow from layer to layer: indices of some kind."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for rows in layers:
        for where, row in rows.items():
            if isinstance(row, tuple) and len(row) == 2 and type(row[1]) is int:
                numbers.setdefault(where, []).append(row[1])
    return {w for w, found in numbers.items() if len(found) > 1 and all(a < b for a, b in pairwise(found))}


def reduced(model: nn.Module, runs: Sequence[Run]) -> nn.Module:
    """``model`` without the layers that ``runs`` drop, the others renumbered; modules above them are copied shallowly.

    Layers, parameters and all other objects are those of ``model``, which does not change.
    """
    kept = {path: kept_layers(runs, path, len(layers)) for path, layers in lists(model)}
    dropped = {id(layers): kept[path] for path, layers in lists(model) if len(kept[path]) < len(layers)}
    copies: dict[int, nn.Module] = {}

    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        if id(module) in dropped:
            members = list(module._modules.values())
            children = {str(i): members[k] for i, k in enumerate(dropped[id(module)])}
        elif any(id(m) in dropped for m in module.modules()):
            children = {key: None if m is None else copy_of(m) for key, m in module._modules.items()}
        else:
            return module
        twin = module.__class__.__new__(module.__class__)
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_modules"] = children
        copies[id(module)] = twin
        return twin

    return copy_of(model)


def kept_layers(runs: Sequence[Run], path: str, count: int) -> list[int]:
    """Indices of the layers of the list ``path`` that the small model has."""
    gone = {i for run in runs if run.path == path for i in run.dropped}
    return [i for i in range(count) if i not in gone]
