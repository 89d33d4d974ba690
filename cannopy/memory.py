"""What one die holds of a compiled graph: weights, caches, communication buffers; and whether its HBM has room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from cannopy.fusion_rules.parallel.experts import EXPERTS
from cannopy.fusion_rules.parallel.legality import DEFAULT_BUFFER_MB, MIB
from cannopy.fx_passes.parallel import ranks_of
from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware


@dataclass(frozen=True)
class DieMemory:
    """Bytes of one die. ``weights``: parameters and derived weights that the graph reads, and its constants.
    ``caches``: tensors that the graph writes. ``inputs``: the other arguments. ``buffers``: of communicators, two of
    HCCL_BUFFSIZE each (HCCL user guide); ``buffsize_mb`` {group: MB} are the sizes taken, 200 where nothing asks for
    more. ``activations``: most that is alive at once in graph order. ``reserved``: for the runtime and fragmentation,
    assumed. ``capacity``: HBM of the target."""

    weights: int
    caches: int
    inputs: int
    buffers: int
    activations: int
    reserved: int
    capacity: int
    buffsize_mb: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of it with the reserve."""
        return self.weights + self.caches + self.inputs + self.buffers + self.activations + self.reserved

    @property
    def fits(self) -> bool:
        """Whether the HBM has room for it."""
        return self.total <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """Plain data, bytes."""
        return asdict(self) | {"total": self.total, "fits": self.fits}


def of(program: Program, target: str) -> DieMemory:
    """Memory of the final graph of ``program`` on a die of ``target``."""
    graph, specs = program.gm.graph, {s.name: s for s in program.inputs}
    weights = caches = inputs = 0
    for node in graph.nodes:
        if node.op == "get_attr":
            weights += _bytes(node)
        elif node.op == "placeholder":
            spec = specs.get(node.name)
            if spec is None or (spec.kind in ("parameter", "buffer") and not spec.mutated):
                weights += _bytes(node) if node.users else 0
            elif spec.mutated:
                caches += _bytes(node)
            else:
                inputs += _bytes(node)
    capacity = int(load_hardware(target).hbm_bytes)
    sizes = buffsizes(program)
    return DieMemory(weights, caches, inputs, 2 * MIB * sum(sizes.values()), _alive(graph),
                     int(load_constants()["memory.reserved"] * capacity), capacity, sizes)


def buffsizes(program: Program) -> dict[str, int]:
    """HCCL_BUFFSIZE in MB of each communicator that the graph talks in, by kind of group. HCCL makes one at its first
    use."""
    texts = [a for n in program.gm.graph.nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, str)]
    groups = dict.fromkeys(text.split(".")[1] for text in texts if ranks_of(text))
    asked = max((spread.buffer_mb for spread in program.facts.get(EXPERTS, ())), default=0)
    return {kind: max(DEFAULT_BUFFER_MB, asked if kind == "ep" else 0) for kind in groups}


def _alive(graph: fx.Graph) -> int:
    """Most bytes of results that are alive at once when the nodes run in graph order; views count as copies do."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        ends.setdefault(user, []).append(node)
    now = most = 0
    for node in graph.nodes:
        if node.op == "call_function":
            now += _own(node)
            most = max(most, now)
        now -= sum(_own(n) for n in ends.get(node, ()) if n.op == "call_function")
    return most


def _own(node: fx.Node) -> int:
    """Bytes that ``node`` makes; none for a write into a cache, an item of several results, or another view."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    if any(r.alias_info is not None for r in target._schema.returns) or "wait_tensor" in str(target):
        return 0
    return _bytes(node)


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors: Iterable[Any] = value if isinstance(value, tuple | list) else [value]
    return sum(t.numel() * t.dtype.itemsize for t in tensors if isinstance(t, torch.Tensor))
