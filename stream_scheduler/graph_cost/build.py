"""From the final graph of a program to a schedule in graph order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cannopy.fx_passes import kernels
from cannopy.fx_passes.graph import is_call
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.graph_cost import attention, matmuls, vectors
from cannopy.stream_scheduler.graph_cost.shapes import Call, tensor_bytes
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.simulator import Schedule, Task, Weight

aten = torch.ops.aten
TABLE = {**vectors.TABLE, **attention.TABLE, **matmuls.TABLE}
FREE = (
    *kernels.RENAMES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
    torch.ops._c10d_functional.wait_tensor.default,
)
"""Names for memory that is there already."""


@dataclass(frozen=True)
class GraphSchedule:
    """A schedule on one stream, and the operations {name: calls} that no formula describes: they are priced by the
    bytes of their tensors."""

    schedule: Schedule
    unmapped: dict[str, int]


def schedule_of(program: Program, pricing: Pricing) -> GraphSchedule:
    """The device kernels of ``program`` in graph order, with their data dependencies."""
    graph = program.gm.graph
    folded = kernels.folded(graph)
    resident = {spec.name for spec in program.inputs if spec.kind == "parameter"}
    resident |= {entry.name for entry in program.weights}
    sources: dict[fx.Node, tuple[str, ...]] = {}
    tasks: list[Task] = []
    unmapped: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in folded:
            continue
        deps = tuple(dict.fromkeys(name for n in node.all_input_nodes for name in sources.get(n, ())))
        if is_call(node, *FREE):
            sources[node] = deps
            continue
        call = call_of(node)
        if not call.known:
            name = target_name(node)
            unmapped[name] = unmapped.get(name, 0) + 1
        load = pricing.price(call.kernel, call.cube_only, **call.sizes)
        tasks.append(Task(node.name, load, deps=deps, weights=_weights(node, resident, load.work.weight_bytes),
                          label=target_name(node), layer=node.meta.get("layer")))
        sources[node] = (node.name,)
    return GraphSchedule(Schedule(tuple(_after_readers(graph, tasks, sources))), unmapped)


def _after_readers(graph: fx.Graph, tasks: list[Task], sources: dict[fx.Node, tuple[str, ...]]) -> list[Task]:
    """Who makes the new value of an input comes behind the tasks before it that read the old one: on a device the value
    may be made in the memory of the input."""
    order = {task.name: i for i, task in enumerate(tasks)}
    more: dict[str, dict[str, None]] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = copy.args[:2]
        writers = sources.get(value, ()) if isinstance(value, fx.Node) else ()
        readers = _readers(target, sources)
        for writer in writers:
            found = more.setdefault(writer, {})
            found.update(dict.fromkeys(r for r in readers if order[r] < order[writer]))
    return [dataclasses.replace(task, deps=tuple(dict.fromkeys((*task.deps, *more[task.name]))))
            if task.name in more else task for task in tasks]


def _readers(target: Any, sources: dict[fx.Node, tuple[str, ...]]) -> list[str]:
    """Tasks that read ``target`` or a view of it."""
    found, stack = [], list(target.users)
    while stack:
        node = stack.pop()
        if sources.get(node) == (node.name,):
            found.append(node.name)
        elif is_call(node, *FREE):
            stack.extend(node.users)
    return found


def call_of(node: fx.Node) -> Call:
    """The kernel and sizes of ``node``; an operation without a formula, or in a form that its formula does not take,
    is a copy of its bytes and counts as not known."""
    name = target_name(node)
    pricer = TABLE.get(name) or TABLE.get(name.partition(".")[0] + "." + name.split(".")[1])
    if pricer is None:
        return _by_bytes(node)
    try:
        found = pricer(node)
    except (AttributeError, IndexError, TypeError, ValueError):  # numbers where tensors are expected, fewer dimensions
        return _by_bytes(node)
    return found if all(value > 0 for value in found.sizes.values()) else _by_bytes(node)


def target_name(node: fx.Node) -> str:
    """``aten.add.Tensor``, ``npu.npu_rms_norm``: without the overload when that is the default."""
    return str(node.target).removesuffix(".default")


def _by_bytes(node: fx.Node) -> Call:
    return Call("copy", {"elements": tensor_bytes(node) / 2, "bytes": 1.0}, known=False)


def _weights(node: fx.Node, resident: set[str], total: float) -> tuple[Weight, ...]:
    """The parameters that ``node`` reads, with the bytes that its formula counts divided by their sizes."""
    found = {}
    for source in node.all_input_nodes:
        origin = source
        while is_call(origin, *FREE) and origin.all_input_nodes:
            origin = origin.all_input_nodes[0]
        value = origin.meta.get("val")
        if origin.op == "placeholder" and origin.name in resident and isinstance(value, torch.Tensor):
            found[origin.name] = float(value.numel() * value.dtype.itemsize)
    whole = sum(found.values())
    return tuple(Weight(name, total * size / whole) for name, size in found.items()) if whole and total else ()
