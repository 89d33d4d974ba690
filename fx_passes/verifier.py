"""What must hold of a program after every pass.

A `Verifier` is made from the program before the first pass. It remembers which nodes it has checked and looks again
only at those whose call or whose arguments' kinds changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import alias, dump
from cannopy.fx_passes.graph import aten, is_call, where
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.provenance import without_source

NEW_MUTATIONS = "mutations changed"
"""Key of `Program.facts`: names of placeholders that a pass was entitled to start or stop mutating."""


class VerifyError(RuntimeError):
    """A program breaks the rule ``check`` at ``node``."""

    def __init__(self, check: str, node: fx.Node | None, expected: str, found: str) -> None:
        place = "" if node is None else f" at {node.name} ({where(node)})"
        super().__init__(f"{check}{place}: expected {expected}, found {found}")
        self.check = check
        self.node = node
        self.expected = expected
        self.found = found


class Verifier:
    """Checks programs against what one of them was at the start."""

    def __init__(self, program: Program) -> None:
        self._mutated = mutated(program.gm.graph)
        self._results = _results(program.gm.graph)
        self._sourceless = without_source(program.gm.graph)
        self._calls = {n.name for n in program.gm.graph.nodes if n.op == "call_function"}
        self._seen: dict[fx.Node, Any] = {}

    def verify(self, program: Program) -> None:
        """Raise `VerifyError` at the first thing that does not hold."""
        graph = program.gm.graph
        self._order(graph)
        self._functional(graph)
        self._placeholders(program)
        self._values(graph)
        self._mutations(program)
        self._outputs(graph)
        self._provenance(graph)

    def _order(self, graph: fx.Graph) -> None:
        defined: set[fx.Node] = set()
        names: set[str] = set()
        for node in graph.nodes:
            for used in node.all_input_nodes:
                if used not in defined:
                    raise VerifyError("topological order", node, f"{used.name} to stand before it",
                                      "it nowhere" if used.graph is not graph else "it later")
                if node not in used.users:
                    raise VerifyError("topological order", node, f"to be a user of {used.name}", "it is none")
            if node.name in names:
                raise VerifyError("single definition", node, "one node of that name", "two")
            names.add(node.name)
            defined.add(node)
        try:
            graph.lint()
        except RuntimeError as e:
            raise VerifyError("topological order", None, "a graph that torch.fx accepts", str(e)) from e

    def _functional(self, graph: fx.Graph) -> None:
        """Only trailing copies mutate, each placeholder at most once, and nothing reads an old value after that."""
        written: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output" or is_call(node, aten.copy_.default):
                values = node.args[1:] if node.op == "call_function" else node.args
                for used in alias.nodes_in(values):
                    owner = alias.base(used)
                    if owner in written:
                        raise VerifyError("old value of a mutated input", node, f"no use of {owner.name} after its "
                                          "copy_", f"{used.name}, which shares its memory")
            if is_call(node, aten.copy_.default):
                self._trailing_copy(node, written)
                written.add(node.args[0])
            elif node.op == "call_function" and alias.mutates(node):
                raise VerifyError("functional graph", node, "no mutation but trailing copies", str(node.target))
            elif written and node.op == "call_function":
                raise VerifyError("trailing copies", node, "only copies and the output after the first copy_",
                                  str(node.target))

    @staticmethod
    def _trailing_copy(node: fx.Node, written: set[fx.Node]) -> None:
        target, value = node.args[0], node.args[1]
        if not isinstance(target, fx.Node) or target.op != "placeholder":
            raise VerifyError("functional graph", node, "a copy_ onto an input of the graph", f"one onto {target}")
        if target in written:
            raise VerifyError("single definition", node, f"one copy_ onto {target.name}", "two")
        kinds = [dump.kind(n.meta.get("val")) for n in (target, value) if isinstance(n, fx.Node)]
        if len(set(kinds)) != 1:
            raise VerifyError("trailing copies", node, f"a value of {kinds[0]}", kinds[-1])

    def _values(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "output":
                continue
            if "val" not in node.meta:
                raise VerifyError("metadata", node, "meta['val']", "none")
            if node.op != "call_function" or is_call(node, aten.copy_.default):
                continue
            key = _signature(node)
            if self._seen.get(node) != key:
                _check_value(node)
                self._seen[node] = key

    def _placeholders(self, program: Program) -> None:
        kinds = {s.name: (s.view if s.view is not None else s.shape, s.dtype) for s in program.inputs}
        bound = [s.name for s in program.inputs] + [w.name for w in program.weights]
        found = {n.name: n for n in program.gm.graph.nodes if n.op == "placeholder"}
        if sorted(bound) != sorted(found):
            missing = sorted(set(bound) ^ set(found)) or "a name bound twice"
            raise VerifyError("inputs", None, "one placeholder for each input and derived weight",
                              f"no match for {missing}")
        for name, (shape, dtype) in kinds.items():
            value = found[name].meta.get("val")
            if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) != (tuple(shape), dtype):
                raise VerifyError("inputs", found[name], f"{dtype}{list(shape)} as it is bound", dump.kind(value))

    def _mutations(self, program: Program) -> None:
        allowed = set(program.facts.get(NEW_MUTATIONS, ()))
        now = mutated(program.gm.graph)
        for name in sorted((now ^ self._mutated) - allowed):
            want, have = ("a copy_", "none") if name in self._mutated else ("no copy_", "one")
            raise VerifyError("mutations", None, f"{want} onto {name}", have)

    def _outputs(self, graph: fx.Graph) -> None:
        now = _results(graph)
        if now != self._results:
            raise VerifyError("results", None, f"{self._results}", f"{now}")

    def _provenance(self, graph: fx.Graph) -> None:
        if self._calls and self._sourceless == self._calls:
            return  # captured without source lines
        for name in sorted(without_source(graph) - self._sourceless):
            node = next(n for n in graph.nodes if n.name == name)
            raise VerifyError("provenance", node, "meta['source']", "none")


def mutated(graph: fx.Graph) -> set[str]:
    """Names of the placeholders that a ``copy_`` writes."""
    return {n.args[0].name for n in graph.nodes if is_call(n, aten.copy_.default) and isinstance(n.args[0], fx.Node)}


def _results(graph: fx.Graph) -> list[str]:
    output = next(iter(reversed(graph.nodes)))
    values = output.args[0]
    values = values if isinstance(values, list | tuple) else [values]
    return [dump.kind(v.meta.get("val")) if isinstance(v, fx.Node) else repr(v) for v in values]


def _signature(node: fx.Node) -> Any:
    kinds = tuple((n, dump.kind(n.meta.get("val"))) for n in node.all_input_nodes)
    return node.target, repr(node.args), repr(node.kwargs), kinds, dump.kind(node.meta["val"])


def _check_value(node: fx.Node) -> None:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with alias.fake_mode_of(node), torch.no_grad():
            real = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as e:  # whatever an operator raises means that this call is illegal
        raise VerifyError("metadata", node, f"{node.target} to accept its arguments", f"{type(e).__name__}: {e}") from e
    if dump.kind(real) != dump.kind(node.meta["val"]):
        raise VerifyError("metadata", node, dump.kind(real), dump.kind(node.meta["val"]))
