"""Editing an FX graph so that every node keeps true metadata and its provenance."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from cannopy.fx_passes.propagate import Propagation

aten = torch.ops.aten

_PROPAGATION = "propagation"
"""Key of ``GraphModule.meta``: the results of calls on fake values that editors of this graph have computed."""

PROVENANCE = ("source", "source_text", "module_path", "layer", "stack_trace", "nn_module_stack")


def is_call(value: object, *targets: Any) -> bool:
    """Whether ``value`` is a call_function node of one of ``targets``."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets


def shape(node: fx.Node) -> tuple[int, ...]:
    """The static shape of a tensor node."""
    return tuple(int(d) for d in node.meta["val"].shape)


def dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a tensor node."""
    found: torch.dtype = node.meta["val"].dtype
    return found


def truncates(node: fx.Node) -> bool:
    """Whether ``node`` casts floats to integers, bools or floats of 8 bits: no cast that a rule may look through."""
    if not is_call(node, aten._to_copy.default):
        return False
    kind, source = dtype(node), node.args[0]
    return isinstance(source, fx.Node) and dtype(source).is_floating_point and dtype(source) != kind and (
        not kind.is_floating_point or kind.itemsize == 1)


def where(node: fx.Node) -> str:
    """The user's source line of ``node`` for messages, or its name when the line is unknown."""
    line = node.meta.get("source")
    return f"{line}" if line else f"node {node.name}"


def operator_named(name: str) -> Any:
    """The operator with the full name ``name`` ("aten::add.Tensor"), None when nothing has registered it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)


class Editor:
    """Adds nodes to a graph; each new node gets its fake value and the provenance of a model node.

    New nodes are created through `call`, inside ``with editor.before(node)``; ``made`` has them in order. ``touched``
    has the nodes that `replace` gave another operand.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph: fx.Graph = gm.graph
        self._like: fx.Node | None = None
        self._rule: str | None = None
        self._mode: FakeTensorMode | None = None
        self._propagation: Propagation = gm.meta.setdefault(_PROPAGATION, Propagation())
        self._propagation.renew()
        self._impure: dict[Any, bool] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self.made: list[fx.Node] = []
        self.touched: list[fx.Node] = []

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake mode that the values of this graph belong to."""
        if self._mode is None:
            first = next((n.meta["val"] for n in self.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)), None)
            self._mode = detect_fake_mode(first) or FakeTensorMode()
        return self._mode

    @contextmanager
    def before(self, node: fx.Node, *, like: fx.Node | None = None, rule: str | None = None) -> Iterator[None]:
        """Insert before ``node``; new nodes take the provenance of ``like`` (default: ``node``)."""
        with self.graph.inserting_before(node), self.provenance_of(like or node, rule=rule):
            yield

    @contextmanager
    def provenance_of(self, like: fx.Node, *, rule: str | None = None) -> Iterator[None]:
        """New nodes take the provenance of ``like``; the insertion point stays."""
        saved = self._like, self._rule
        self._like, self._rule = like, rule or self._rule
        try:
            yield
        finally:
            self._like, self._rule = saved

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call_function node with its fake value computed by running ``target`` on the arguments' fake values."""
        node = self.graph.call_function(target, args, kwargs)
        self.refresh(node)
        self._inherit(node)
        self.made.append(node)
        return node

    def placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        """A new placeholder after the last one, carrying the fake value of ``value``."""
        last = next(reversed(self.graph.find_nodes(op="placeholder")))
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.target = node.name
        node.meta["val"] = value
        return node

    def operators(self) -> set[Any]:
        """Everything that the graph calls."""
        table = self.graph._find_nodes_lookup_table.table
        return {target for (op, target), nodes in table.items() if op == "call_function" and nodes}

    def calls(self, targets: Iterable[Any]) -> list[fx.Node]:
        """The calls of ``targets``, operators or their full names ("npu::npu_swiglu"), in graph order."""
        wanted = {operator_named(t) if isinstance(t, str) else t for t in targets} - {None}
        found = [n for t in wanted for n in self.graph.find_nodes(op="call_function", target=t, sort=False)]
        return sorted(found)

    def input(self, name: str) -> fx.Node:
        """The placeholder ``name``; KeyError if there is none."""
        found = self._placeholders.get(name)
        if found is None or found.name != name or found._erased:
            self._placeholders = {n.name: n for n in self.graph.find_nodes(op="placeholder", sort=False)}
            found = self._placeholders[name]
        return found

    def refresh(self, node: fx.Node) -> None:
        """Compute ``node.meta['val']`` from its arguments."""
        node.meta["val"] = self._propagation.value(node.target, node.args, node.kwargs, lambda: self.fake_mode)

    def _inherit(self, node: fx.Node) -> None:
        if self._like is not None:
            for key in PROVENANCE:
                if key in self._like.meta:
                    node.meta[key] = self._like.meta[key]
            if "rule" in self._like.meta:
                node.meta["rule"] = self._like.meta["rule"]
        if self._rule is not None:
            node.meta["rule"] = self._rule

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Give every user of ``old`` the node ``new`` instead; ``old`` stays until dead code is removed.

        ``gm.meta["replaced"]`` keeps the names of both, so that a captured node can be followed to the final graph.
        """
        self.touched.extend(old.users)
        old.replace_all_uses_with(new)
        self.gm.meta.setdefault("replaced", {})[old.name] = new.name

    def reshape(self, x: fx.Node, size: Sequence[int]) -> fx.Node:
        """``x`` in shape ``size``; ``x`` itself when it has that shape."""
        return x if shape(x) == tuple(size) else self.call(aten.reshape.default, x, list(size))

    def expand(self, x: fx.Node, size: Sequence[int]) -> fx.Node:
        """``x`` broadcast to ``size``; ``x`` itself when it has that shape."""
        return x if shape(x) == tuple(size) else self.call(aten.expand.default, x, list(size))

    def item(self, x: fx.Node, index: int) -> fx.Node:
        """Output ``index`` of a node with several."""
        return self.call(operator.getitem, x, index)

    def value(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The fake value of a call that is not added; ``args`` may hold nodes and fake values."""
        return self._propagation.value(target, args, kwargs, lambda: self.fake_mode)

    def empty(self, size: Sequence[int], kind: torch.dtype) -> torch.Tensor:
        """A fake tensor of that shape and dtype."""
        found: torch.Tensor = self.value(aten.empty.memory_format, list(size), dtype=kind)
        return found

    def recalled(self, name: Any, operands: Any, make: Callable[[], Any]) -> Any:
        """`Propagation.recalled` of this graph."""
        return self._propagation.recalled(name, operands, make)

    def fake(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A fake tensor of this graph's mode built by ``make``."""
        with self.fake_mode:
            return make()

    def sweep(self) -> int:
        """Remove dead nodes (mutations and placeholders stay); the number removed."""
        dead = 0
        for node in reversed(self.graph.nodes):
            if not node.users and not self.is_impure(node):
                self.graph.erase_node(node)
                dead += 1
        return dead

    def is_impure(self, node: fx.Node) -> bool:
        """`fx.Node.is_impure`, asked once per operator."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return node.is_impure()
        if target not in self._impure:
            self._impure[target] = node.is_impure()
        return self._impure[target]
