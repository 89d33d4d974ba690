"""GE graphs written op by op, for what torchair's lowering does not produce or must not."""

from __future__ import annotations

from typing import Any

import torch


def dtype_number(dtype: torch.dtype) -> int:
    """GE's protobuf number of a dtype, from torchair's own table."""
    from torchair.ge._ge_graph import torch_type_to_ge_proto_type

    return int(torch_type_to_ge_proto_type(dtype))


class Graph:
    """A GraphDef under construction."""

    def __init__(self, name: str = "by_hand") -> None:
        from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

        self.proto: Any = GraphDef()
        self.proto.name = name

    def data(self, index: int, like: torch.Tensor) -> str:
        """Graph input ``index`` with the dtype and shape of ``like``; the name of its output edge."""
        op = self.op("Data", f"arg{index}")
        op.attr["index"].i = index
        for desc in (op.input_desc.add(), op.output_desc.add()):
            desc.dtype = dtype_number(like.dtype)
            desc.shape.dim.extend(like.shape)
        return f"arg{index}:0"

    def const(self, value: torch.Tensor) -> str:
        """A constant; the name of its output edge."""
        op = self.op("Const", f"const{len(self.proto.op)}")
        tensor = op.attr["value"].t
        tensor.desc.dtype = dtype_number(value.dtype)
        tensor.desc.shape.dim.extend(value.shape)
        tensor.data = bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
        op.output_desc.add().dtype = dtype_number(value.dtype)
        return f"{op.name}:0"

    def op(
        self, type_: str, name: str, inputs: tuple[str, ...] = (), names: tuple[str, ...] = (), outs: int = 0
    ) -> Any:
        """An op of ``type_`` with data and control edges; attributes are set on what is returned."""
        op = self.proto.op.add()
        op.type, op.name = type_, name
        op.input.extend(inputs)
        for n in names:
            op.input_desc.add().name = n
        for i in range(outs):
            op.output_desc.add().name = f"y{i}"
        return op

    def outputs(self, *edges: str) -> Any:
        """Close the graph with these outputs; the GraphDef."""
        self.op("NetOutput", "NetOutput", edges)
        return self.proto
