"""Regions: layers that are proven alike, of which a program holds only a few.

A run of like layers is cut into *units* of one period each (one layer, or a few when kinds alternate). The program
holds the units 0, 1, 2 and the last; what lies between is left out and comes back when `stamp` copies unit 2, the
template. Everything before that works on the small program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from cannopy.fx_passes.program import InputSpec, Program

REGIONS = "regions"
"""Key of `Program.facts`: the `Regions` of a program that holds few of its layers."""

BEFORE, FIRST, TEMPLATE, AFTER = range(4)
"""Where a node stands: before unit 1 (or shared by all), in unit 1, in unit 2, or behind it."""


@dataclass(frozen=True)
class Copy:
    """One unit that was left out.

    ``prefixes``: the submodules of the template -> those of this unit. ``inputs``: what each placeholder of the
    template is bound to here; ``name`` is a wish. ``least``: as ``facts["least"]``, by placeholder of the template.
    """

    prefixes: Mapping[str, str]
    inputs: Mapping[str, InputSpec]
    least: Mapping[str, float | None]


@dataclass(frozen=True)
class Region:
    """One run of like units.

    ``first`` and ``template`` are the submodules (``model.layers.4``) of units 1 and 2, ``after`` those of the layers
    behind them. ``shift``: placeholder of unit 1 -> its counterpart in unit 2; ``later``: placeholders that belong to
    layers behind unit 2.
    """

    path: str
    first: tuple[str, ...]
    template: tuple[str, ...]
    after: tuple[str, ...]
    shift: Mapping[str, str]
    later: frozenset[str]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Regions:
    """All runs of a program. ``reason`` says why layers are not folded where they are not."""

    found: tuple[Region, ...] = ()
    layers: int = 0
    captured: int = 0
    reason: str = ""
    stamped: bool = field(default=False)

    def summary(self) -> dict[str, int | str]:
        """What the report says: the number of layers in lists, how many were captured, and why not fewer."""
        return {"layers": self.layers, "captured": self.captured, "reason": self.reason}

    @property
    def pending(self) -> tuple[Region, ...]:
        """The runs that the graph does not hold in full."""
        return () if self.stamped else self.found


def of(program: Program) -> Regions:
    """The regions of ``program``; none when it was captured whole."""
    found: Regions = program.facts.get(REGIONS, Regions())
    return found


def prefix_of(path: str, prefixes: Iterable[str]) -> str | None:
    """Which of ``prefixes`` is the module path ``path`` or above it."""
    return next((p for p in prefixes if path == p or path.startswith(f"{p}.")), None)


def renamed(path: str, prefixes: Mapping[str, str]) -> str:
    """``path`` with the prefix that is a key replaced by its value."""
    found = prefix_of(path, prefixes)
    return path if found is None else prefixes[found] + path[len(found) :]


def layer_of(path: str) -> int | None:
    """The first number in a dotted module path, as provenance counts layers."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def places(program: Program, region: Region) -> dict[fx.Node, int]:
    """Where each node stands in ``region``: the latest of its own layer and of what it reads."""
    label = dict.fromkeys(region.first, FIRST) | dict.fromkeys(region.template, TEMPLATE)
    label |= dict.fromkeys(region.after, AFTER)
    own = dict.fromkeys(region.shift, FIRST) | dict.fromkeys(region.shift.values(), TEMPLATE)
    own |= dict.fromkeys(region.later, AFTER)
    for entry in program.weights:
        own[entry.name] = max((own.get(source, BEFORE) for source in entry.sources), default=BEFORE)
    found: dict[fx.Node, int] = {}
    for node in program.gm.graph.nodes:
        if node.op == "placeholder":
            found[node] = own.get(node.name, BEFORE)
        elif node.op == "output":
            found[node] = AFTER
        else:
            prefix = prefix_of(str(node.meta.get("module_path", "")), label)
            place = BEFORE if prefix is None else label[prefix]
            found[node] = max([place, *(found.get(n, BEFORE) for n in node.all_input_nodes)])
    return found


def size(program: Program) -> int:
    """Nodes of the whole model's graph: those of ``program`` and those of the layers that are left out of it."""
    total = len(program.gm.graph.nodes)
    for region in of(program).pending:
        template = sum(place == TEMPLATE for place in places(program, region).values())
        total += len(region.copies) * template
    return total
