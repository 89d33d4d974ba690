"""graph of few layers  →  graph of all layers: the template's nodes are copied once for each layer that is missing.

Units 1 and 2 of a run (see `regions`) must have become the same graph up to names, one unit apart: the same
operations, constants, metadata and weight recipes, each operand in the same relation. Then each unit between them
and the last would have become that graph as well, because every pass looks at a layer and its neighbours.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import dump, order, regions
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.normalise.writes import NONNEGATIVE
from cannopy.fx_passes.program import Program, WeightEntry
from cannopy.fx_passes.regions import AFTER, BEFORE, FIRST, REGIONS, TEMPLATE, Copy, Region
from cannopy.fx_passes.verifier import NEW_MUTATIONS
from cannopy.fx_passes.weight_plan import LEAST, LEAST_READ

NAME = "regions"

Nodes = dict[fx.Node, fx.Node]


class StampError(RuntimeError):
    """The passes did not leave the layers of a run alike; the message says where they differ."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.node = node


def run(program: Program) -> int:
    """Bring back the layers that are missing; the number of nodes added.

    Raises:
        StampError: they cannot be derived from the ones that are there.
    """
    found = regions.of(program)
    before = len(program.gm.graph.nodes)
    for region in found.pending:
        _Stamp(program, region).run()
    if found.pending:
        order.sort(program.gm.graph)
        place = {n.name: i for i, n in enumerate(program.gm.graph.nodes)}
        program.inputs.sort(key=lambda spec: place[spec.name])
        program.facts[REGIONS] = replace(found, stamped=True)
    return len(program.gm.graph.nodes) - before


class _Stamp:
    """One region. ``shift``: node of unit 1 -> its counterpart in the template."""

    def __init__(self, program: Program, region: Region) -> None:
        self.program = program
        self.region = region
        self.graph = program.gm.graph
        self.places = regions.places(program, region)
        self.by_name = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        self.specs = {s.name: s for s in program.inputs}
        self.entries = {e.name: e for e in program.weights}
        self.names: dict[str, list[str]] = {}
        self.shift: Nodes = {}

    def run(self) -> None:
        self._pair_inputs()
        self._pair_calls()
        self._check_users()
        self._check_values()
        last = {node: node for node in self.shift.values()}
        template = [n for n in self.graph.nodes if n in last]
        cursor = _Cursors(template, self.entries)
        for copy in self.region.copies:
            last = self._copy(copy, template, last, cursor)
        for node in template:
            for user in [u for u in node.users if self.places.get(u) == AFTER]:
                user.replace_input_with(node, last[node])
        self._facts()

    def _pair_inputs(self) -> None:
        for first, template in self.region.shift.items():
            if first not in self.by_name or template not in self.by_name:
                raise StampError(f"input {template} was removed")
            a, b = self.specs[first], self.specs[template]
            if (a.kind, a.view, a.mutated, a.held) != (b.kind, b.view, b.mutated, b.held):
                raise StampError(f"{a.source} and {b.source} are seen in different ways", self.by_name[template])
            self._pair(self.by_name[first], self.by_name[template])
        entries: dict[tuple[Any, ...], WeightEntry] = {(e.sources, e.recipe, e.nz): e for e in self.program.weights}
        known = {a.name: b.name for a, b in self.shift.items()}
        for entry in self.program.weights:
            if self.places[self.by_name[entry.name]] == FIRST:
                sources = tuple(known.get(s, s) for s in entry.sources)
                twin = entries.get((sources, entry.recipe, entry.nz))
                if twin is None or self.places[self.by_name[twin.name]] != TEMPLATE:
                    raise StampError(f"weight {entry.name} has no counterpart in the next layer")
                self._pair(self.by_name[entry.name], self.by_name[twin.name])
                known[entry.name] = twin.name

    def _pair(self, a: fx.Node, b: fx.Node) -> None:
        if _kind(a) != _kind(b):
            raise StampError(f"{b.name} is {_kind(b)} where the layer before has {_kind(a)}", b)
        self.shift[a] = b

    def _pair_calls(self) -> None:
        units: dict[int, list[fx.Node]] = {FIRST: [], TEMPLATE: []}
        for node in self.graph.nodes:
            place = self.places[node]
            if place in units and (node.op != "placeholder" or node not in self.shift):
                units[place].append(node)
        paired = set(self.shift.values())
        for a, b in zip(units[FIRST], [n for n in units[TEMPLATE] if n not in paired], strict=False):
            self._check(a, b)
            self._pair(a, b)
        missing = len(units[FIRST]) - len([n for n in units[TEMPLATE] if n not in paired])
        if missing:
            raise StampError(f"one layer became {len(units[FIRST])} nodes, the next {len(units[FIRST]) - missing}")

    def _check(self, a: fx.Node, b: fx.Node) -> None:
        if (a.op, a.target, a.meta.get("source"), a.meta.get("rule")) != (
            b.op, b.target, b.meta.get("source"), b.meta.get("rule"),
        ):  # fmt: skip
            raise StampError(f"{b.name} ({b.target}) stands where the layer before has {a.name} ({a.target})", b)
        if _text(a.args, a.kwargs) != _text(b.args, b.kwargs):
            raise StampError(f"{b.name} has other constants than {a.name} in the layer before", b)
        for x, y in zip(_operands(a), _operands(b), strict=True):
            if not self._corresponds(x, y):
                raise StampError(f"{b.name} reads {y.name} where {a.name} in the layer before reads {x.name}", b)

    def _corresponds(self, x: fx.Node, y: fx.Node) -> bool:
        if self.places[x] == FIRST:
            return self.shift.get(x) is y
        if self.places[y] == FIRST:  # a value that each unit takes from the one before
            return self.places[x] == BEFORE and _kind(x) == _kind(y)
        return x is y

    def _check_users(self) -> None:
        """Nothing behind the template may read unit 1, and the template must not be read in front."""
        for node, place in self.places.items():
            if place == FIRST:
                stray = next((u for u in node.users if self.places[u] == AFTER), None)
                if stray is not None:
                    raise StampError(f"{stray.name} reads values of single layers ({node.name})", stray)

    def _check_values(self) -> None:
        """What a rule was told of a weight's values must hold in the copies."""
        known = self.program.facts.get(LEAST, {})
        for name in sorted(self.program.facts.get(LEAST_READ, ())):
            for copy in self.region.copies if name in self.region.shift.values() else ():
                value = copy.least.get(name)
                if (value is not None and value >= 0) != (known.get(name, -1.0) >= 0):
                    raise StampError(f"{copy.inputs[name].source} has another sign than {name}, which a rule asked for")

    def _copy(self, copy: Copy, template: list[fx.Node], last: Nodes, cursor: _Cursors) -> Nodes:
        """The nodes of one missing unit by those of the template; ``last`` are those of the unit before it."""
        made: Nodes = {}
        moved: dict[str, str] = {}

        def operand(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            return last[self.shift[node]] if node in self.shift else node

        for node in template:
            with self.graph.inserting_after(cursor.of(node)):
                if node.op == "placeholder":
                    new = self._placeholder(node, copy, made)
                else:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
                    new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            new.meta.update(node.meta)
            self._move(new.meta, copy.prefixes, moved)
            made[node] = new
            cursor.advance(node, new)
        return made

    @staticmethod
    def _move(meta: dict[str, Any], prefixes: Mapping[str, str], known: dict[str, str]) -> None:
        """Put the metadata of a copied node into its own layer; ``known`` are paths that have been renamed before."""
        path = str(meta.get("module_path", ""))
        if path not in known:
            known[path] = regions.renamed(path, prefixes)
        if known[path] != path:
            meta["module_path"], meta["layer"] = known[path], regions.layer_of(known[path])

    def _placeholder(self, node: fx.Node, copy: Copy, made: Nodes) -> fx.Node:
        wish = copy.inputs.get(node.name)
        spec, entry = self.specs.get(node.name), self.entries.get(node.name)
        new = self.graph.placeholder(wish.name if wish is not None else _weight_name(node.name, copy))
        new.target = new.name
        if wish is not None and spec is not None:
            own = wish if spec.held is None else wish.part(spec.held)
            self.program.inputs.append(replace(own, name=new.name, view=spec.view, mutated=spec.mutated))
        elif entry is not None:
            names = {a.name: b.name for a, b in made.items() if a.op == "placeholder"}
            sources = tuple(names.get(s, s) for s in entry.sources)
            self.program.weights.append(replace(entry, name=new.name, sources=sources))
        self.names.setdefault(node.name, []).append(new.name)
        return new

    def _facts(self) -> None:
        """Facts that list placeholders of the template hold for the copies too; new inputs may be written."""
        facts = self.program.facts
        listed = facts.get(NONNEGATIVE, ())
        facts[NONNEGATIVE] = frozenset(listed) | {n for t, names in self.names.items() if t in listed for n in names}
        facts[NEW_MUTATIONS] = frozenset(facts.get(NEW_MUTATIONS, ())) | {n for v in self.names.values() for n in v}


class _Cursors:
    """The node behind which the next copy goes: inputs, derived weights, calls and trailing copies apart."""

    def __init__(self, template: list[fx.Node], weights: Container[str]) -> None:
        self._weights = weights
        self._at = {self._class(node): node for node in template}

    def _class(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "weight" if node.name in self._weights else "input"
        return "copy" if is_call(node, aten.copy_.default) else "call"

    def of(self, node: fx.Node) -> fx.Node:
        """Where the copy of the template's ``node`` goes."""
        return self._at[self._class(node)]

    def advance(self, node: fx.Node, new: fx.Node) -> None:
        """``new`` is the copy of ``node``."""
        self._at[self._class(node)] = new


def _weight_name(name: str, copy: Copy) -> str:
    """``model_layers_5_w_t`` → ``model_layers_17_w_t``."""
    for old, new in copy.prefixes.items():
        name = name.replace(f"{old.replace('.', '_')}_", f"{new.replace('.', '_')}_")
    return name


def _operands(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _text(*values: Any) -> str:
    return repr(fx.node.map_arg(values, lambda _: "%"))


def _kind(node: fx.Node) -> str:
    """Type, shape and strides of a node's value."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else [value]
    strides = [v.stride() for v in tensors if isinstance(v, torch.Tensor)]
    return f"{dump.kind(value)} strides {strides}"
