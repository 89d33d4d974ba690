"""What a lowered graph is made of: ops, device kernels, full copies of caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cannopy.backend.ge_graph import dtypes, proto
from cannopy.backend.ge_graph.op_types import COPIES, GRAPH_INPUTS, METADATA, NOT_KERNELS, REF_OUTPUTS, SAME_DTYPE

LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Summary:
    """``ge_ops``: ops by type. ``kernels``: device kernels by type, that is without inputs, constants, metadata ops,
    prefetches, Casts without effect and whatever depends on constants only (GE folds it). ``cache_copies``: ops that
    write a whole copy of a graph input which the graph writes (itself or a copy of it; not a one-element counter) or
    which has at least 1 MiB;
    ``copied`` says which (op name, input name)."""

    ge_ops: dict[str, int]
    kernels: dict[str, int]
    cache_copies: int
    copied: tuple[tuple[str, str], ...]


def summary(ge_graph: Any, aliases: Mapping[int, int] | None = None) -> Summary:
    """Count what is in a GE graph (torchair's GraphDef or GeGraph); it need not have run.

    ``aliases`` maps graph output to the graph input that it overwrites, which the graph itself does not say; the host
    engine knows it from its first run (`HostGraph.aliases`). Without it a cache that is rewritten by a ConcatV2 of
    its slices goes unnoticed; a TensorMove before an op that writes in place does not.
    """
    ops = list(ge_graph.op)
    left_out = _constants(ops) | _casts_without_effect(ops)
    kernels = Counter(op.type for op in ops if op.type not in NOT_KERNELS and op.name not in left_out)
    copied = _copied(ops, aliases or {})
    return Summary(
        ge_ops=dict(sorted(Counter(op.type for op in ops).items())),
        kernels=dict(sorted(kernels.items())),
        cache_copies=len(copied),
        copied=copied,
    )


def _inputs(op: Any) -> list[proto.Edge]:
    return [e for e in proto.edges(op)[0] if e is not None]


def _constants(ops: list[Any]) -> set[str]:
    """Names of the ops whose value depends on constants only."""
    by_name = {op.name: op for op in ops}
    known: dict[str, bool] = {}

    def is_constant(name: str) -> bool:
        if name not in known:
            op = by_name[name]
            known[name] = op.type not in GRAPH_INPUTS | {"NetOutput"} and all(
                is_constant(e.source) for e in _inputs(op)
            )
        return known[name]

    return {op.name for op in ops if is_constant(op.name)}


def _casts_without_effect(ops: list[Any]) -> set[str]:
    """Casts to the dtype that their input has: torchair adds them after many products, GE's CastRemovePass takes them
    out. An input of unknown dtype counts as another dtype."""
    by_name = {op.name: op for op in ops}

    def dtype(edge: proto.Edge) -> torch.dtype | None:
        op = by_name[edge.source]
        if op.type in GRAPH_INPUTS:
            return proto.declared_input(op)[1]
        if op.type == "Cast":
            return dtypes.BY_GE_NUMBER.get(int(op.attr["dst_type"].i))
        declared = proto.expected_output(op.output_desc[edge.index])[1] if edge.index < len(op.output_desc) else None
        inputs = _inputs(op)
        if declared is None and op.type in SAME_DTYPE and inputs:
            return dtype(inputs[0])
        return declared

    def without_effect(op: Any) -> bool:
        wanted = dtypes.BY_GE_NUMBER.get(int(op.attr["dst_type"].i))
        return wanted is not None and dtype(_inputs(op)[0]) is wanted

    return {op.name for op in ops if op.type == "Cast" and without_effect(op)}


class _Origins:
    """Which graph input the value on an edge is, or is a copy of."""

    def __init__(self, ops: list[Any]) -> None:
        self.by_name = {op.name: op for op in ops}

    def op_of(self, edge: proto.Edge) -> Any:
        """The op that computes the value, behind ops that only rename memory."""
        op = self.by_name[edge.source]
        while op.type in METADATA and (inputs := _inputs(op)):
            op = self.by_name[inputs[0].source]
        return op

    def graph_input(self, edge: proto.Edge, through: frozenset[str] = frozenset()) -> Any | None:
        """The Data op behind metadata ops, ops that write it in place, and ops of the types ``through``."""
        op = self.by_name[edge.source]
        if op.type in GRAPH_INPUTS:
            return op
        position = REF_OUTPUTS.get(op.type, {}).get(edge.index)
        inputs = proto.edges(op)[0]
        behind = inputs[position] if position is not None else None
        if op.type in METADATA | through and inputs:
            behind = inputs[0]
        return None if behind is None else self.graph_input(behind, through)


def _copied(ops: list[Any], aliases: Mapping[int, int]) -> tuple[tuple[str, str], ...]:
    origins = _Origins(ops)
    data = {int(op.attr["index"].i): op for op in ops if op.type in GRAPH_INPUTS}
    mutated = {data[i].name for i in aliases.values() if i in data}
    for op in ops:
        for position in REF_OUTPUTS.get(op.type, {}).values():
            edge = proto.edges(op)[0][position]
            written = origins.graph_input(edge, frozenset({"TensorMove"})) if edge is not None else None
            if written is not None:
                mutated.add(written.name)
    found: dict[str, str] = {}
    for op in ops:
        if op.type not in COPIES:
            continue
        inputs = [origins.graph_input(e, frozenset({"TensorMove"})) for e in _inputs(op)]
        hit = next((d for d in inputs if d is not None and _is_cache(d, mutated)), None)
        if hit is not None:
            found[op.name] = hit.name
    results = next((_inputs(op) for op in ops if op.type == "NetOutput"), [])
    for output, index in aliases.items():
        producer = origins.op_of(results[output])
        if producer.type in COPIES and index in data:
            found.setdefault(producer.name, data[index].name)
    return tuple(found.items())


def _is_cache(data: Any, mutated: set[str]) -> bool:
    """Whether copying this graph input matters: it is large, or the graph writes it and it is not a lone counter."""
    counter = all(int(dim) == 1 for dim in data.output_desc[0].shape.dim)
    return (data.name in mutated and not counter) or _bytes(data) >= LARGE_BYTES


def _bytes(data: Any) -> int:
    desc = data.output_desc[0]
    size = dtypes.BY_NAME[proto.dtype_name(desc.dtype)].itemsize
    for dim in desc.shape.dim:
        size *= max(int(dim), 0)
    return size
