"""Reading of torchair's GE protobuf: descriptors and edges."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from cannopy.backend.ge_graph import dtypes

_META = re.compile(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\(\[([\d, ]*)\]\)")


@dataclass(frozen=True)
class Edge:
    """Where an input comes from: output ``index`` of op ``source``; index -1 is a control edge."""

    source: str
    index: int

    @property
    def control(self) -> bool:
        """Whether the edge carries order only."""
        return self.index < 0


def edges(op: Any) -> tuple[list[Edge | None], list[Edge]]:
    """Data inputs by position (None: optional input not fed) and control inputs of a GE op."""
    data: list[Edge | None] = []
    control: list[Edge] = []
    for text in op.input:
        if not text:
            data.append(None)
            continue
        source, _, index = text.rpartition(":")
        edge = Edge(source, int(index))
        if edge.control:
            control.append(edge)
        else:
            data.append(edge)
    return data, control


def expected_output(desc: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Shape and dtype that a descriptor declares for an output.

    torchair notes the FX value's shape and dtype as text in the attribute ``_meta``; ops inside a converter have
    none, and nothing is declared for them. The shape is None when it has symbols.
    """
    if "_meta" not in desc.attr:
        return None, None
    m = _META.match(bytes(desc.attr["_meta"].s).decode())
    dtype = dtypes.BY_NAME.get(dtype_name(desc.dtype))
    if m is None:
        return None, dtype
    return tuple(int(d) for d in m[2].replace(" ", "").split(",") if d), dtype


def declared_input(data: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Shape and dtype of a Data op's descriptor; the shape is None when it has symbols (-1, -2)."""
    desc = data.output_desc[0]
    shape = tuple(int(d) for d in desc.shape.dim)
    return (None if any(d < 0 for d in shape) else shape), dtypes.BY_NAME.get(dtype_name(desc.dtype))


def dtype_name(number: int) -> str:
    """``DT_…`` of a protobuf dtype number."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import DataType

    return str(DataType.Name(number))


def fx_name(op: Any) -> str:
    """The FX node and target that torchair noted on an output of ``op``, ``""`` when it did not."""
    for desc in op.output_desc:
        if "_fx_tensor_name" in desc.attr:
            return bytes(desc.attr["_fx_tensor_name"].s).decode().rpartition(".OUTPUT")[0]
    return ""
