"""A program as it was before a pass, to go back to when the pass fails."""

from __future__ import annotations

from typing import Any

from torch import fx

from cannopy.fx_passes.program import Program


class Snapshot:
    """What is needed to make ``program`` again as it is now.

    Nodes are only noted down (operator, arguments, a copy of the metadata); a graph is built from the notes when it is
    needed. Values in the metadata are shared with the live nodes.
    """

    def __init__(self, program: Program) -> None:
        graph = program.gm.graph
        self._nodes = [(n, n.op, n.name, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in graph.nodes]
        self._tracer, self._codegen = graph._tracer_cls, graph._codegen
        self._meta = {k: dict(v) if type(v) is dict else v for k, v in program.gm.meta.items()}
        self._inputs, self._weights = list(program.inputs), list(program.weights)
        self._facts = dict(program.facts)
        self._output = program.output

    def restore(self, program: Program) -> None:
        """Make ``program`` what it was. Its nodes are new objects of the same names."""
        graph = fx.Graph(tracer_cls=self._tracer)
        made: dict[fx.Node, fx.Node] = {}
        for old, op, name, target, args, kwargs, kind, meta in self._nodes:
            new: Any = fx.node.map_arg((args, kwargs), made.__getitem__)
            node = graph.create_node(op, target, new[0], new[1], name, kind)
            if node.name != name:
                node._rename(name)
            node.meta = meta
            made[old] = node
        graph._codegen = self._codegen
        program.gm.graph = graph
        program.gm.meta.clear()
        program.gm.meta.update(self._meta)
        program.inputs, program.weights, program.facts = self._inputs, self._weights, self._facts
        program.output, program.normal_form = self._output, None
