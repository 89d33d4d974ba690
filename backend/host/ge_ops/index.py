"""Reads by index: slices, gathers, one-hot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor, host_ints


def strided_slice(op: Op) -> Kernel:
    """x[begin:end:stride] on ``axes`` (the first ones if not given).

    Masks: bit i of begin_mask or end_mask opens that end, of shrink_axis_mask takes the one position ``begin`` and
    drops the axis; ellipsis and new axes are refused. Bounds clamp as in Python, strides are positive.
    """
    masks = {m: op.integer(m, 0) for m in ("begin_mask", "end_mask", "shrink_axis_mask")}
    if op.integer("ellipsis_mask", 0) or op.integer("new_axis_mask", 0):
        raise op.error("ellipsis_mask and new_axis_mask are not known to the host engine")
    begin_at, end_at = op.at("begin"), op.at("end")
    axes_at, strides_at = op.at("axes"), op.at("strides")
    if begin_at is None or end_at is None:
        raise op.error(f"inputs begin and end are missing, found {op.inputs}")

    def part(args: Sequence[Tensor | None], at: int | None, default: list[int]) -> list[int]:
        value = None if at is None else args[at]
        return default if at is None or value is None else host_ints(op, at, value)

    def kernel(*args: Tensor | None) -> Tensor:
        x = args[0]
        assert x is not None
        begin, end = part(args, begin_at, []), part(args, end_at, [])
        axes = part(args, axes_at, list(range(len(begin))))
        strides = part(args, strides_at, [1] * len(begin))
        where: list[int | slice] = [slice(None)] * x.dim()
        for i, axis in enumerate(axes):
            if masks["shrink_axis_mask"] >> i & 1:
                where[axis] = begin[i]
                continue
            low = None if masks["begin_mask"] >> i & 1 else begin[i]
            high = None if masks["end_mask"] >> i & 1 else end[i]
            where[axis] = slice(low, high, strides[i])
        return x[tuple(where)]

    return kernel


def slice_(op: Op) -> Kernel:
    """``size`` elements (-1: to the end) from ``offsets``, per axis."""

    def kernel(x: Tensor, offsets: Tensor, size: Tensor) -> Tensor:
        starts, sizes = host_ints(op, 1, offsets), host_ints(op, 2, size)
        return x[tuple(slice(s, None if n < 0 else s + n) for s, n in zip(starts, sizes, strict=True))]

    return kernel


def gather(op: Op) -> Kernel:
    """GatherV2 (axis is input 2) and Gather (axis 0): slices of x at ``indices``.

    Negative indices count from the end only with ``negative_index_support``; IndexError outside x.
    """
    if op.integer("batch_dims", 0) != 0:
        raise op.error("batch_dims other than 0 are not known to the host engine")
    negative = op.flag("negative_index_support", False)

    def kernel(x: Tensor, indices: Tensor, axis: Tensor | None = None) -> Tensor:
        dim = (0 if axis is None else host_ints(op, 2, axis)[0]) % x.dim()
        flat = indices.reshape(-1)
        if negative:
            flat = torch.where(flat < 0, flat + x.shape[dim], flat)
        picked = torch.index_select(x, dim, flat)
        return picked.reshape((*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :]))

    return kernel


def gather_elements(op: Op) -> Kernel:
    """y[i][j] = x[index[i][j]][j] for dim 0, and so on."""
    dim = op.integer("dim", 0)
    return lambda x, index: torch.gather(x, dim, index.to(torch.int64))


def gather_nd(op: Op) -> Kernel:
    """y[…] = x[indices[…, 0], indices[…, 1], …]."""
    return lambda x, indices: x[tuple(indices.to(torch.int64).unbind(-1))]


def index_by_tensor(op: Op) -> Kernel:
    """aten.index: ``indices_mask`` says which axes are indexed by the tensors, in order."""
    mask = op.integers("indices_mask")

    def kernel(x: Tensor, *indices: Tensor) -> Tensor:
        rest = iter(indices)
        return x[tuple(next(rest) if m else slice(None) for m in mask)]

    return kernel


def one_hot(op: Op) -> Kernel:
    """``depth`` values along ``axis`` (-1: last): on_value at x, off_value elsewhere."""
    axis = op.integer("axis", -1)

    def kernel(x: Tensor, depth: Tensor, on: Tensor, off: Tensor) -> Tensor:
        dim = axis % (x.dim() + 1)
        shape = [1] * (x.dim() + 1)
        shape[dim] = host_ints(op, 1, depth)[0]
        places = torch.arange(shape[dim]).reshape(shape)
        return torch.where(places == x.unsqueeze(dim), on.reshape(()), off.reshape(()))

    return kernel


OPS: dict[str, Builder] = {
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherNd": gather_nd,
    "GatherV2": gather,
    "IndexByTensor": index_by_tensor,
    "OneHot": one_hot,
    "Slice": slice_,
    "StridedSliceV2": strided_slice,
}
