"""Values of the Const ops of a GE graph."""

from __future__ import annotations

from typing import Any

import torch

from cannopy.backend.ge_graph import dtypes
from cannopy.backend.ge_graph.proto import dtype_name
from cannopy.backend.host.ge_ops.op import OpError


def constant(op: Any) -> torch.Tensor:
    """The tensor in attribute ``value`` of a Const op: raw little-endian data, as GE reads it.

    Raises OpError for a dtype that torch has not and for too little data.
    """
    value = op.attr["value"].t
    name = dtype_name(value.desc.dtype)
    if name not in dtypes.BY_NAME:
        raise OpError(f"GE op {op.type} {op.name!r}: the host engine has no dtype for a constant of {name}")
    dtype = dtypes.BY_NAME[name]
    shape = [int(d) for d in value.desc.shape.dim]
    count = 1
    for d in shape:
        count *= d
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    needed = count * dtype.itemsize
    if len(value.data) < needed:
        raise OpError(
            f"GE op {op.type} {op.name!r}: constant of {name} {shape} needs {needed} bytes, "
            f"the graph has {len(value.data)}"
        )
    return torch.frombuffer(bytearray(value.data[:needed]), dtype=dtype).reshape(shape)
