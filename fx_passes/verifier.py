"""What must hold of a program after every pass.

A `Verifier` is made from the program before the first pass. What is cheap is checked of every node each time: order,
names, users, provenance. What is dear, running an operator on the values of its arguments, is done for nodes that are
new or different and for the users of values that are. A node is different when its operator, its arguments or its
value are other objects than last time, or when the value has another shape or dtype, whoever changed them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import alias, dump
from cannopy.fx_passes.graph import aten, is_call, operator_named, where
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.propagate import Propagation

NEW_MUTATIONS = "mutations changed"
"""Key of `Program.facts`: names of placeholders that a pass was entitled to start or stop mutating."""

SCOPES = {"air::scope_enter": 1, "air::scope_exit": -1}
"""torchair's marks of where a stream, core limit or super kernel begins and ends."""


class VerifyError(RuntimeError):
    """A program breaks the rule ``check`` at ``node``."""

    def __init__(self, check: str, node: fx.Node | None, expected: str, found: str) -> None:
        place = "" if node is None else f" at {node.name} ({where(node)})"
        super().__init__(f"{check}{place}: expected {expected}, found {found}")
        self.check = check
        self.node = node
        self.expected = expected
        self.found = found


_Seen = tuple[Any, Any, Any, Any, tuple[Any, ...]]
"""What a node was: target, args, kwargs, value, shape and dtype of the value."""


class Verifier:
    """Checks programs against what one of them was at the start."""

    def __init__(self, program: Program) -> None:
        graph = program.gm.graph
        self._mutated = mutated(graph)
        self._results = _results(graph)
        self._output = program.output
        calls = [n for n in graph.nodes if n.op == "call_function"]
        self._sourceless = {n.name for n in calls if "source" not in n.meta}
        self._without_source = bool(calls) and len(self._sourceless) == len(calls)
        self._seen: dict[fx.Node, _Seen] = {}
        self._propagation = Propagation()

    def verify(self, program: Program) -> int:
        """Raise `VerifyError` at the first thing that does not hold.

        Returns the number of nodes that are new, different or gone since the last verification.
        """
        graph = program.gm.graph
        self._propagation.renew()
        changed = self._nodes(graph)
        self._scopes(graph)
        self._functional(graph, changed)
        self._placeholders(program)
        self._values(changed)
        self._mutations(program)
        self._outputs(program)
        gone = len(self._seen) + sum(node not in self._seen for node in changed) - len(graph.nodes)
        if gone:
            present = set(graph.nodes)
            self._seen = {node: seen for node, seen in self._seen.items() if node in present}
        self._seen.update(changed)
        return len(changed) + gone

    def forget(self) -> None:
        """Look at every node again the next time."""
        self._seen.clear()
        self._propagation = Propagation()

    def _nodes(self, graph: fx.Graph) -> dict[fx.Node, _Seen]:
        """Check what is cheap of every node; those that are new or different with what they are now."""
        defined: set[fx.Node] = set()
        names: set[str] = set()
        changed: dict[fx.Node, _Seen] = {}
        seen = self._seen
        for node in graph.nodes:
            for used in node.all_input_nodes:
                if used not in defined or node not in used.users:
                    raise _misplaced(graph, node, used, used in defined)
            if node.graph is not graph:
                raise VerifyError("topological order", node, "a node of this graph", "one of another")
            if node.name in names:
                raise VerifyError("single definition", node, "one node of that name", "two")
            names.add(node.name)
            defined.add(node)
            meta = node.meta
            if "val" not in meta and node.op != "output":
                raise VerifyError("metadata", node, "meta['val']", "none")
            if "source" not in meta and node.op == "call_function":
                self._provenance(node)
            value = meta.get("val")
            target, args, kwargs, size = node.target, node.args, node.kwargs, _size(value)
            before = seen.get(node)
            if before is None or not (
                before[0] is target and before[1] is args and before[2] is kwargs and before[3] is value
                and before[4] == size
            ):
                _legal(graph, node)
                changed[node] = target, args, kwargs, value, size
        return changed

    def _provenance(self, node: fx.Node) -> None:
        if not self._without_source and node.name not in self._sourceless:
            raise VerifyError("provenance", node, "meta['source']", "none")

    def _scopes(self, graph: fx.Graph) -> None:
        """Every scope that is entered is left before the results are written, and none is left twice."""
        marks = [n for name in SCOPES if (target := operator_named(name)) is not None
                 for n in graph.find_nodes(op="call_function", target=target, sort=False)]
        open_scopes: list[fx.Node] = []
        for node in sorted(marks):
            if SCOPES[node.target._schema.name] > 0:
                open_scopes.append(node)
            elif open_scopes:
                open_scopes.pop()
            else:
                raise VerifyError("balanced scopes", node, "a scope that was entered", "none open")
        if open_scopes:
            raise VerifyError("balanced scopes", open_scopes[-1], "a scope_exit behind it", "none")

    def _functional(self, graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
        """Only trailing copies mutate, each placeholder at most once, and nothing reads an old value after that."""
        trailing: list[fx.Node] = []
        for node in reversed(graph.nodes):
            if not is_call(node, aten.copy_.default) and node.op != "output":
                break
            trailing.append(node)
        copies = graph.find_nodes(op="call_function", target=aten.copy_.default, sort=False)
        clean = len(trailing) == len(copies) + 1 and trailing[0].op == "output"
        if clean and not any(alias.mutates(n) and n.target is not aten.copy_.default for n in changed):
            _check_functional(reversed(trailing))
        else:
            _check_functional(graph.nodes)

    def _values(self, changed: dict[fx.Node, _Seen]) -> None:
        again = set(changed)
        for node, now in changed.items():
            before = self._seen.get(node)
            if before is None or before[3] is not now[3] or before[4] != now[4]:
                again.update(node.users)
        for node in sorted(again):
            if node.op == "call_function" and not is_call(node, aten.copy_.default) and _scope(node) is None:
                self._check_value(node)

    def _check_value(self, node: fx.Node) -> None:
        try:
            real = self._propagation.value(node.target, node.args, node.kwargs, lambda: alias.fake_mode_of(node))
        except Exception as e:  # whatever an operator raises means that this call is illegal
            raise VerifyError("metadata", node, f"{node.target} to accept its arguments",
                              f"{type(e).__name__}: {e}") from e
        if _size(real) != _size(node.meta["val"]):
            raise VerifyError("metadata", node, dump.kind(real), dump.kind(node.meta["val"]))

    def _placeholders(self, program: Program) -> None:
        bound = [s.name for s in program.inputs] + [w.name for w in program.weights]
        found = {n.name: n for n in program.gm.graph.find_nodes(op="placeholder", sort=False)}
        if len(bound) != len(found) or set(bound) != found.keys():
            missing = sorted(set(bound) ^ set(found)) or "a name bound twice"
            raise VerifyError("inputs", None, "one placeholder for each input and derived weight",
                              f"no match for {missing}")
        for spec in program.inputs:
            value = found[spec.name].meta.get("val")
            wanted = tuple(spec.view if spec.view is not None else spec.shape), spec.dtype
            if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) != wanted:
                raise VerifyError("inputs", found[spec.name], f"{wanted[1]}{list(wanted[0])} as it is bound",
                                  dump.kind(value))

    def _mutations(self, program: Program) -> None:
        allowed = set(program.facts.get(NEW_MUTATIONS, ()))
        now = mutated(program.gm.graph)
        for name in sorted((now ^ self._mutated) - allowed):
            want, have = ("a copy_", "none") if name in self._mutated else ("no copy_", "one")
            raise VerifyError("mutations", None, f"{want} onto {name}", have)

    def _outputs(self, program: Program) -> None:
        now = _results(program.gm.graph)
        if now != self._results:
            raise VerifyError("results", None, f"{self._results}", f"{now}")
        if program.output is not self._output and program.output != self._output:
            raise VerifyError("results", None, f"{self._output}", f"{program.output}")


def mutated(graph: fx.Graph) -> set[str]:
    """Names of the placeholders that a ``copy_`` writes."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default, sort=False)
    return {n.args[0].name for n in copies if isinstance(n.args[0], fx.Node)}


def _misplaced(graph: fx.Graph, node: fx.Node, used: fx.Node, defined: bool) -> VerifyError:
    if defined:
        return VerifyError("topological order", node, f"to be a user of {used.name}", "it is none")
    return VerifyError("topological order", node, f"{used.name} to stand before it",
                       "it nowhere" if used.graph is not graph else "it later")


def _size(value: Any) -> tuple[Any, ...]:
    """(shape, dtype) of a tensor, those of several, the type of anything else."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_size, value))
    return (type(value),)


def _legal(graph: fx.Graph, node: fx.Node) -> None:
    """What torch.fx asks of a node, as `fx.Graph.lint` does."""
    if node not in graph._find_nodes_lookup_table:
        raise VerifyError("topological order", node, "a node that fx.Graph.find_nodes finds", "one that it does not")
    if node.op not in ("placeholder", "call_function", "get_attr", "output"):
        raise VerifyError("topological order", node, "an input, a call, a constant or the output", str(node.op))
    if node.op == "get_attr":
        owner: Any = graph.owning_module
        for name in str(node.target).split("."):
            owner = getattr(owner, name, None)
        if owner is None and graph.owning_module is not None:
            raise VerifyError("topological order", node, "an attribute of the module", f"none named {node.target}")
    elif callable(node.target) != (node.op == "call_function"):
        raise VerifyError("topological order", node, "a callable target of a call only", repr(node.target))


def _scope(node: fx.Node) -> int | None:
    return SCOPES.get(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else None


def _check_functional(nodes: Iterable[fx.Node]) -> None:
    written: set[fx.Node] = set()
    for node in nodes:
        if node.op == "output" or is_call(node, aten.copy_.default):
            values = node.args[1:] if node.op == "call_function" else node.args
            for used in alias.nodes_in(values):
                owner = alias.base(used)
                if owner in written:
                    raise VerifyError("old value of a mutated input", node, f"no use of {owner.name} after its "
                                      "copy_", f"{used.name}, which shares its memory")
        if is_call(node, aten.copy_.default):
            _check_copy(node, written)
            written.add(node.args[0])  # type: ignore[arg-type]
        elif node.op == "call_function" and alias.mutates(node):
            raise VerifyError("functional graph", node, "no mutation but trailing copies", str(node.target))
        elif written and node.op == "call_function":
            raise VerifyError("trailing copies", node, "only copies and the output after the first copy_",
                              str(node.target))


def _check_copy(node: fx.Node, written: set[fx.Node]) -> None:
    target, value = node.args[0], node.args[1]
    if not isinstance(target, fx.Node) or target.op != "placeholder":
        raise VerifyError("functional graph", node, "a copy_ onto an input of the graph", f"one onto {target}")
    if target in written:
        raise VerifyError("single definition", node, f"one copy_ onto {target.name}", "two")
    kinds = [_size(n.meta.get("val")) for n in (target, value) if isinstance(n, fx.Node)]
    if len(set(kinds)) != 1:
        wanted, found = (dump.kind(n.meta.get("val")) for n in (target, value) if isinstance(n, fx.Node))
        raise VerifyError("trailing copies", node, f"a value of {wanted}", found)


def _results(graph: fx.Graph) -> list[str]:
    output = next(iter(reversed(graph.nodes)))
    values = output.args[0]
    values = values if isinstance(values, list | tuple) else [values]
    return [dump.kind(v.meta.get("val")) if isinstance(v, fx.Node) else repr(v) for v in values]
