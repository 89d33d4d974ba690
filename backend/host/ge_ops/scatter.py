"""Writes by index. The types in `op_types.REF_OUTPUTS` write their first input, the others give a new tensor."""

from __future__ import annotations

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def assign(op: Op) -> Kernel:
    """ref = value, in ref's memory."""
    return lambda ref, value: ref.copy_(value)


def scatter_elements(op: Op) -> Kernel:
    """aten.scatter along ``axis``; ``reduction`` none, add or mul."""
    axis, reduction = op.integer("axis", 0), op.text("reduction", "none")
    if reduction == "none":
        return lambda data, indices, updates: torch.scatter(data, axis, indices.to(torch.int64), updates)
    if reduction == "add":
        return lambda data, indices, updates: torch.scatter_add(data, axis, indices.to(torch.int64), updates)
    if reduction == "mul":
        return lambda data, indices, updates: torch.scatter_reduce(data, axis, indices.to(torch.int64), updates, "prod")
    raise op.error(f"reduction is {reduction!r}, expected none, add or mul")


def _places(op: Op, var: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    places = tuple(indices.to(torch.int64).unbind(-1))
    for axis, place in enumerate(places):
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < var.shape[axis]:
            raise op.error(f"an index on axis {axis} is outside 0 … {var.shape[axis] - 1}")
    return places


def scatter_nd(op: Op, *, in_place: bool) -> Kernel:
    """var[indices[…, 0], …] = updates. OpError for an index outside var, negative ones included."""

    def kernel(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        target = var if in_place else var.clone()
        return target.index_put_(_places(op, target, indices), updates)

    return kernel


def scatter(op: Op) -> Kernel:
    """npu.scatter_update: row b of ``updates`` goes to var[b], from position indices[b] on along ``axis``."""
    reduce, axis = op.text("reduce", "update"), op.integer("axis", 0)
    if reduce != "update":
        raise op.error(f"reduce is {reduce!r}, only update is known to the host engine")

    def kernel(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        dim = axis % var.dim()
        for b, start in enumerate(indices.reshape(-1).tolist()):
            length = updates.shape[dim]
            if not 0 <= start <= var.shape[dim] - length:
                raise op.error(f"positions {start} … {start + length - 1} are outside axis {dim} of {list(var.shape)}")
            var[b].narrow(dim - 1, start, length).copy_(updates[b])
        return var

    return kernel


def inplace_update(op: Op) -> Kernel:
    """var[indices] = updates along axis 0."""
    return lambda var, indices, updates: var.index_copy_(0, indices.reshape(-1).to(torch.int64), updates)


def index_add(op: Op) -> Kernel:
    """var[indices] += alpha * updates along ``axis``."""
    axis = op.integer("axis", 0)

    def kernel(var: Tensor, indices: Tensor, updates: Tensor, alpha: Tensor | None = None) -> Tensor:
        factor = 1 if alpha is None else alpha.item()
        return var.index_add_(axis, indices.to(torch.int64), updates, alpha=factor)

    return kernel


OPS: dict[str, Builder] = {
    "Assign": assign,
    "InplaceIndexAdd": index_add,
    "InplaceUpdate": inplace_update,
    "Scatter": scatter,
    "ScatterElements": scatter_elements,
    "ScatterNdUpdate": lambda op: scatter_nd(op, in_place=True),
    "TensorScatterUpdate": lambda op: scatter_nd(op, in_place=False),
}
