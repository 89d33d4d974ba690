"""Ops that move or rename data without computing: reshapes, transposes, joins, cuts, fills."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor, host_ints


def identity(op: Op) -> Kernel:
    """The same memory: nothing that is written in place reaches an Identity's input (torchair moves it first)."""
    return lambda x: x


def tensor_move(op: Op) -> Kernel:
    """A real copy; torchair puts it before ops that write their input."""
    return lambda x: x.clone(memory_format=torch.contiguous_format)


def reshape(op: Op) -> Kernel:
    """``shape`` is input 1, with at most one -1."""
    if op.integer("axis", 0) != 0 or op.integer("num_axes", -1) != -1:
        raise op.error("axis and num_axes are not known to the host engine")
    return lambda x, shape: x.reshape(host_ints(op, 1, shape))


def unsqueeze(op: Op) -> Kernel:
    """New axes of size 1 at ``axes`` of the result."""
    axes = op.integers("axes")

    def kernel(x: Tensor) -> Tensor:
        rank = x.dim() + len(axes)
        for axis in sorted(a % rank for a in axes):
            x = x.unsqueeze(axis)
        return x

    return kernel


def expand_dims(op: Op) -> Kernel:
    """A new axis of size 1 at the position in input 1."""
    return lambda x, axis: x.unsqueeze(host_ints(op, 1, axis)[0])


def squeeze(op: Op) -> Kernel:
    """Without the axes of size 1 in ``axis`` (all of size 1 when empty)."""
    axes = op.integers("axis")

    def kernel(x: Tensor) -> Tensor:
        if not axes:
            return x.squeeze()
        if any(x.shape[a] != 1 for a in axes):
            raise op.error(f"axes {axes} of {list(x.shape)} are not all of size 1")
        return x.squeeze(axes)

    return kernel


def transpose(op: Op) -> Kernel:
    """Axes in the order of input 1 (Transpose) or of attribute ``perm`` (TransposeD)."""
    if len(op.inputs) == 1:
        fixed = op.integers("perm")
        return lambda x: x.permute(fixed)
    return lambda x, perm: x.permute(host_ints(op, 1, perm))


def bitcast(op: Op) -> Kernel:
    """The bits as ``type``. A smaller type adds a last axis, a larger one takes it away (GE's rule)."""
    dtype = op.dtype("type")

    def kernel(x: Tensor) -> Tensor:
        x = x.contiguous()
        if dtype.itemsize == x.dtype.itemsize:
            return x.view(dtype)
        if dtype.itemsize < x.dtype.itemsize:
            return x.unsqueeze(-1).view(dtype)
        return x.view(dtype).squeeze(-1)

    return kernel


def concat(op: Op) -> Kernel:
    """The parts of dynamic input ``x`` joined along ``concat_dim`` (input or attribute)."""
    parts, at = op.span("x"), op.at("concat_dim")

    def kernel(*args: Tensor) -> Tensor:
        dim = op.integer("concat_dim", 0) if at is None else host_ints(op, at, args[at])[0]
        return torch.cat(args[parts], dim)

    return kernel


def pack(op: Op) -> Kernel:
    """The inputs stacked along a new ``axis``."""
    axis = op.integer("axis", 0)
    return lambda *args: torch.stack(args, axis)


def unpack(op: Op) -> Kernel:
    """x without ``axis``, one output per position."""
    axis = op.integer("axis", 0)
    return lambda x: torch.unbind(x, axis)


def split(op: Op) -> Kernel:
    """``num_split`` equal parts along attribute ``split_dim``."""
    dim, parts = op.integer("split_dim", 0), op.integer("num_split", 1)

    def kernel(x: Tensor) -> Sequence[Tensor]:
        if x.shape[dim] % parts:
            raise op.error(f"axis {dim} of {list(x.shape)} has no {parts} equal parts")
        return torch.split(x, x.shape[dim] // parts, dim)

    return kernel


def split_v(op: Op) -> Kernel:
    """Parts of ``size_splits`` (input 1, one may be -1) along ``split_dim`` (input 2)."""

    def kernel(x: Tensor, size_splits: Tensor, split_dim: Tensor) -> Sequence[Tensor]:
        sizes, dim = host_ints(op, 1, size_splits), host_ints(op, 2, split_dim)[0]
        rest = x.shape[dim] - sum(s for s in sizes if s >= 0)
        return torch.split(x, [rest if s < 0 else s for s in sizes], dim)

    return kernel


def broadcast_to(op: Op) -> Kernel:
    """x with the shape in input 1; -1 keeps an axis."""
    return lambda x, shape: x.expand(host_ints(op, 1, shape))


def tile(op: Op) -> Kernel:
    """x repeated ``multiples`` times per axis."""
    return lambda x, multiples: x.repeat(host_ints(op, 1, multiples))


def fill(op: Op) -> Kernel:
    """A tensor of shape ``dims`` (input 0) full of the value in input 1."""

    def kernel(dims: Tensor, value: Tensor) -> Tensor:
        return value.reshape(()).expand(host_ints(op, 0, dims)).contiguous()

    return kernel


def empty(op: Op) -> Kernel:
    """Memory that nothing has written; NaN (or the least integer) on the host, so that reading it shows."""
    dtype = op.dtype("dtype")
    if op.flag("init", False):
        return lambda dims: torch.zeros(host_ints(op, 0, dims), dtype=dtype)
    unset: float | int = 0
    if dtype.is_floating_point:
        unset = float("nan")
    elif dtype is not torch.bool:
        unset = torch.iinfo(dtype).min
    return lambda dims: torch.full(host_ints(op, 0, dims), unset, dtype=dtype)


def as_strided(op: Op) -> Kernel:
    """A view of x's memory by size, stride and offset (inputs 1, 2, 3); x is contiguous on a device."""

    def kernel(x: Tensor, size: Tensor, stride: Tensor, storage_offset: Tensor | None = None) -> Tensor:
        start = 0 if storage_offset is None else host_ints(op, 3, storage_offset)[0]
        dense = x.contiguous()
        return dense.as_strided(host_ints(op, 1, size), host_ints(op, 2, stride), dense.storage_offset() + start)

    return kernel


def range_(op: Op) -> Kernel:
    """start, start + delta, … before limit, in start's dtype."""

    def kernel(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
        return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)

    return kernel


def shape(op: Op) -> Kernel:
    """The dims of x as an integer vector."""
    dtype = op.dtype("dtype") if "dtype" in op.attrs else torch.int32
    return lambda x: torch.tensor(list(x.shape), dtype=dtype)


def reverse(op: Op) -> Kernel:
    """x backwards along the axes in input 1."""
    return lambda x, axis: torch.flip(x, host_ints(op, 1, axis))


def pad(op: Op) -> Kernel:
    """Constant padding: input 1 has (before, after) per axis, from the first axis on."""
    mode = op.text("mode", "constant")
    if mode != "constant" or not op.flag("paddings_contiguous", True):
        raise op.error(f"mode {mode!r} or split paddings are not known to the host engine")

    def kernel(x: Tensor, paddings: Tensor, value: Tensor | None = None) -> Tensor:
        flat = host_ints(op, 1, paddings)
        pairs = [flat[i : i + 2] for i in range(0, len(flat), 2)]
        last_first = [n for pair in reversed(pairs) for n in pair]
        return torch.nn.functional.pad(x, last_first, value=0 if value is None else value.item())

    return kernel


def triangle(lower: bool) -> Builder:
    """Tril and Triu about ``diagonal``."""

    def build(op: Op) -> Kernel:
        diagonal = op.integer("diagonal", 0)
        return (lambda x: torch.tril(x, diagonal)) if lower else (lambda x: torch.triu(x, diagonal))

    return build


OPS: dict[str, Builder] = {
    "AsStrided": as_strided,
    "Bitcast": bitcast,
    "BroadcastTo": broadcast_to,
    "ConcatV2": concat,
    "ConcatV2D": concat,
    "Empty": empty,
    "Expand": broadcast_to,
    "ExpandDims": expand_dims,
    "Fill": fill,
    "Identity": identity,
    "Pack": pack,
    "PadV3": pad,
    "Range": range_,
    "Reshape": reshape,
    "ReverseV2": reverse,
    "Shape": shape,
    "SplitD": split,
    "SplitV": split_v,
    "Squeeze": squeeze,
    "TensorMove": tensor_move,
    "Tile": tile,
    "Transpose": transpose,
    "TransposeD": transpose,
    "Tril": triangle(lower=True),
    "Triu": triangle(lower=False),
    "Unpack": unpack,
    "Unsqueeze": unsqueeze,
}
