"""npu_scatter_nd_update and npu_scatter_nd_update_ on the CPU."""

from __future__ import annotations

import torch

from ....fusion_rules.contracts import value_error


def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """``input[indices[i]] = updates[i]`` in place; returns `input`.

    indices [..., a] index the first a dimensions of input, updates has the shape indices.shape[:-1] + input.shape[a:].
    An index outside the tensor is refused: the device does not check it. Source: op-plugin doc of
    npu_scatter_nd_update.
    """
    _write(input, indices, updates, "npu_scatter_nd_update_")
    return input


def npu_scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """The functional twin of `npu_scatter_nd_update_`: a copy of `input` with the rows written."""
    out = input.clone(memory_format=torch.contiguous_format)
    _write(out, indices, updates, "npu_scatter_nd_update")
    return out


def _write(out: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, op: str) -> None:
    depth = indices.shape[-1]
    if indices.numel() == 0:
        return
    limits = torch.tensor(out.shape[:depth])
    outside = (indices < 0) | (indices >= limits)
    if bool(outside.any()):
        at = outside.any(dim=-1).nonzero()[0].tolist()
        raise value_error(op, "index-range", f"{indices[tuple(at)].tolist()} at position {at} for {list(out.shape)}")
    out.index_put_(tuple(indices.long().unbind(-1)), updates)
