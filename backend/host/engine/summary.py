"""What a lowered graph is made of: ops, device kernels, full copies of caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cannopy.backend.host.engine import proto
from cannopy.backend.host.ge_ops import dtypes
from cannopy.backend.host.ge_ops.table import REF_OUTPUTS

METADATA = frozenset(
    {
        "Bitcast",
        "ExpandDims",
        "FlattenV2",
        "Identity",
        "NoOp",
        "Rank",
        "Reshape",
        "Shape",
        "Size",
        "Squeeze",
        "Unsqueeze",
    }
)
"""Ops that rename memory; GE launches nothing for them."""

NOT_KERNELS = METADATA | {"Data", "RefData", "Const", "Constant", "ConstPlaceHolder", "NetOutput", "Cmo"}

COPIES = frozenset(
    {
        "Assign",
        "ConcatD",
        "ConcatV2",
        "ConcatV2D",
        "ScatterElements",
        "SelectV2",
        "TensorMove",
        "TensorScatterUpdate",
    }
)
"""Ops that write all of their result although most of it is an unchanged input."""

LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Summary:
    """``ge_ops``: ops by type. ``kernels``: device kernels by type, that is without inputs, constants, metadata ops,
    prefetches and whatever depends on constants only (GE folds it). ``cache_copies``: ops that copy a whole graph
    input which the graph mutates or which has at least 1 MiB; ``copied`` says which (op name, input name)."""

    ge_ops: dict[str, int]
    kernels: dict[str, int]
    cache_copies: int
    copied: tuple[tuple[str, str], ...]


def summary(ge_graph: Any, aliases: Mapping[int, int] | None = None) -> Summary:
    """Count what is in a GE graph (torchair's GraphDef or GeGraph).

    ``aliases`` maps graph output to the graph input that it overwrites, which the graph itself does not say;
    `HostGraph.summary` passes what it saw in its first run.
    """
    ops = list(ge_graph.op)
    constant = _constants(ops)
    kernels = Counter(op.type for op in ops if op.type not in NOT_KERNELS and op.name not in constant)
    copied = _copied(ops, set((aliases or {}).values()))
    return Summary(
        ge_ops=dict(sorted(Counter(op.type for op in ops).items())),
        kernels=dict(sorted(kernels.items())),
        cache_copies=len(copied),
        copied=copied,
    )


def _sources(op: Any) -> list[str]:
    data, _ = proto.edges(op)
    return [e.source for e in data if e is not None]


def _constants(ops: list[Any]) -> set[str]:
    """Names of the ops whose value depends on constants only."""
    by_name = {op.name: op for op in ops}
    known: dict[str, bool] = {}

    def is_constant(name: str) -> bool:
        if name not in known:
            op = by_name[name]
            known[name] = op.type not in {"Data", "RefData", "NetOutput"} and all(map(is_constant, _sources(op)))
        return known[name]

    return {op.name for op in ops if is_constant(op.name)}


def _copied(ops: list[Any], overwritten: set[int]) -> tuple[tuple[str, str], ...]:
    by_name = {op.name: op for op in ops}

    def graph_input(name: str) -> Any | None:
        op = by_name[name]
        while op.type in METADATA and _sources(op):
            op = by_name[_sources(op)[0]]
        return op if op.type in {"Data", "RefData"} else None

    mutated = {op.name for op in ops if op.type in {"Data", "RefData"} and int(op.attr["index"].i) in overwritten}
    for op in ops:
        sources = proto.edges(op)[0]
        for position in REF_OUTPUTS.get(op.type, {}).values():
            edge = sources[position]
            written = graph_input(edge.source) if edge is not None else None
            if written is not None:
                mutated.add(written.name)
    found: list[tuple[str, str]] = []
    for op in ops:
        if op.type not in COPIES:
            continue
        inputs = [d for d in (graph_input(s) for s in _sources(op)) if d is not None]
        hit = next((d for d in inputs if d.name in mutated or _bytes(d) >= LARGE_BYTES), None)
        if hit is not None:
            found.append((op.name, hit.name))
    return tuple(found)


def _bytes(data: Any) -> int:
    desc = data.output_desc[0]
    size = dtypes.BY_NAME[proto.dtype_name(desc.dtype)].itemsize
    for dim in desc.shape.dim:
        size *= max(int(dim), 0)
    return size
