"""Graphs of all ranks run side by side in one process, node by node; collectives exchange between them.

That needs the graphs to call the same operators in the same order, which a layout promises anyway. A joint operator
takes the arguments of the ranks of its group, in the order of the group, and gives a result for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the npu ops)
from torch import fx

from cannopy.backend.host import kernels
from cannopy.backend.host.exchange import reduce
from cannopy.fx_passes.graph import is_call
from cannopy.fx_passes.parallel import Group
from cannopy.fx_passes.program import Program

Tensor = torch.Tensor
Joint = Callable[[Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]], Sequence[Any]]
_ops = torch.ops._c10d_functional


@dataclass
class Rank:
    """What one rank gave: its outputs, and its inputs by name as they are afterwards (caches were written)."""

    outputs: list[Tensor]
    inputs: dict[str, Tensor]


def run(programs: Sequence[Program], values: Sequence[Mapping[str, Tensor]],
        joint: Mapping[Any, tuple[str, Joint]] | None = None,
        modes: Sequence[AbstractContextManager[Any]] = ()) -> list[Rank]:
    """Run rank r's program on ``values[r]`` (inputs by placeholder; weights of the plan are built from them).

    ``joint``: further operators that exchange, with the name of the argument that holds the group. ``modes``: what
    each rank's own calls stand in, entered for each of them.
    """
    kernels.register()
    table = {**_joint(), **(joint or {})}
    modes = modes or [nullcontext()] * len(programs)
    inputs = [{k: v.clone() for k, v in own.items()} for own in values]
    memory: list[dict[fx.Node, Any]] = [{} for _ in programs]
    for nodes in zip(*(list(p.gm.graph.nodes) for p in programs), strict=True):
        assert len({(n.op, n.target if n.op == "call_function" else None) for n in nodes}) == 1, [*map(str, nodes)]
        if nodes[0].op == "placeholder":
            for node, own, program, known in zip(nodes, inputs, programs, memory, strict=True):
                known[node] = _weight(program, node.name, own)
        elif nodes[0].op == "call_function":
            arguments = [fx.node.map_arg((n.args, dict(n.kwargs)), known.__getitem__)
                         for n, known in zip(nodes, memory, strict=True)]
            for known, node, result in zip(memory, nodes, _call(nodes, arguments, table, modes), strict=True):
                known[node] = result
    last = [next(reversed(p.gm.graph.nodes)) for p in programs]
    return [Rank([known[n] for n in node.all_input_nodes], own)
            for node, known, own in zip(last, memory, inputs, strict=True)]


def _weight(program: Program, name: str, own: Mapping[str, Tensor]) -> Tensor:
    if name in own:
        return own[name]
    entry = next(e for e in program.weights if e.name == name)
    return entry.build([_weight(program, source, own) for source in entry.sources])


def _call(nodes: Sequence[fx.Node], arguments: Sequence[Any], table: Mapping[Any, tuple[str, Joint]],
          modes: Sequence[AbstractContextManager[Any]]) -> list[Any]:
    found = table.get(nodes[0].target)
    results: list[Any] = [None] * len(nodes)
    if found is None:
        for i, (node, (args, kwargs), mode) in enumerate(zip(nodes, arguments, modes, strict=True)):
            with torch.no_grad(), mode:
                results[i] = node.target(*args, **kwargs)  # type: ignore[operator]
        return results
    where, joint = found
    groups = [_argument(n, where) for n in nodes]
    for name in dict.fromkeys(groups):
        ranks = members(name)
        assert [groups[r] for r in ranks] == [name] * len(ranks), f"not all of {ranks} are in {name}"
        done = joint([arguments[r][0] for r in ranks], [arguments[r][1] for r in ranks])
        for rank, result in zip(ranks, done, strict=True):
            results[rank] = result
    return results


def _argument(node: fx.Node, name: str) -> str:
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index(name)
    return str(node.args[at] if at < len(node.args) else node.kwargs[name])


def members(name: str) -> tuple[int, ...]:
    """The ranks of the group with that stable name."""
    _, kind, first, stride, size = name.split(".")
    found = Group(kind, int(first), int(stride), int(size))
    assert found.name == name
    return found.ranks


def collectives(program: Program) -> dict[str, int]:
    """{``all_gather_into_tensor dense_tp``: calls} of a graph."""
    found = Counter(
        f"{node.target.__name__.split('.')[0]} {str(node.args[-1]).split('.')[1]}"  # type: ignore[union-attr]
        for node in program.gm.graph.nodes if is_call(node, *_joint()) and node.target is not _ops.wait_tensor.default)
    return dict(found)


def _joint() -> dict[Any, tuple[str, Joint]]:
    return {
        _ops.all_gather_into_tensor.default: ("group_name", _all_gather),
        _ops.reduce_scatter_tensor.default: ("group_name", _reduce_scatter),
        _ops.all_reduce.default: ("group_name", _all_reduce),
        _ops.all_to_all_single.default: ("group_name", _all_to_all),
    }


def _all_gather(args: Sequence[Sequence[Any]], _: Any) -> list[Tensor]:
    assert {a[1] for a in args} == {len(args)}
    return [torch.cat([a[0] for a in args])] * len(args)


def _all_reduce(args: Sequence[Sequence[Any]], _: Any) -> list[Tensor]:
    assert {a[1] for a in args} == {"sum"}
    return [reduce(torch.stack([a[0] for a in args]), "sum")] * len(args)


def _reduce_scatter(args: Sequence[Sequence[Any]], _: Any) -> list[Tensor]:
    assert {a[1:3] for a in args} == {("sum", len(args))}
    return list(reduce(torch.stack([a[0] for a in args]), "sum").chunk(len(args)))


def _all_to_all(args: Sequence[Sequence[Any]], _: Any) -> list[Tensor]:
    parts = [x.split(list(send)) for x, _, send, _ in args]
    found = [torch.cat([parts[i][j] for i in range(len(args))]) for j in range(len(args))]
    assert all(list(map(len, (parts[i][j] for i in range(len(args))))) == list(args[j][1]) for j in range(len(args)))
    return found
