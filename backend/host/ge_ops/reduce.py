"""Reductions over axes, arg-reductions, scans."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor, host_ints


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % max(x.dim(), 1) for a in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _any(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.any(x, axes, keepdim=keep)


def _all(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.all(x, axes, keepdim=keep)


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def over_axes(fn: Callable[[Tensor, list[int], bool], Tensor]) -> Builder:
    """A reduction with axes as second input (``axes``) or attribute, and ``keep_dims``.

    Without axes x stays as it is if the op says ``noop_with_empty_axes``; OpError if it does not.
    """

    def build(op: Op) -> Kernel:
        keep, noop = op.flag("keep_dims", False), op.flag("noop_with_empty_axes", False)

        def reduced(x: Tensor, axes: list[int]) -> Tensor:
            if axes:
                return fn(x, axes, keep)
            if not noop:
                raise op.error("no axes are given and noop_with_empty_axes is not set")
            return x

        if len(op.inputs) == 1:
            fixed = op.integers("axes")
            return lambda x: reduced(x, fixed)
        return lambda x, axes: reduced(x, host_ints(op, 1, axes))

    return build


def mean_with_cast(op: Op) -> Kernel:
    """Mean over the axes in input 1, converted to ``dtype`` first."""
    keep, dtype = op.flag("keep_dims", False), op.dtype("dtype")
    return lambda x, axes: torch.mean(x, host_ints(op, 1, axes), keepdim=keep, dtype=dtype)


def std_with_mean(op: Op) -> Kernel:
    """y = standard deviation of x about ``mean`` over ``dim`` with Bessel's ``correction``; or 1/(y+epsilon)."""
    dim, keep = op.integers("dim"), op.flag("keepdim", False)
    correction = op.integer("correction", 1) if op.flag("unbiased", True) else 0
    if op.flag("invert", False):
        raise op.error("invert=True is not known to the host engine")
    return lambda x, mean: torch.std(x, dim or None, correction=correction, keepdim=keep)


def lp_norm(op: Op) -> Kernel:
    """y = (sum |x|^p)^(1/p) over ``axes``."""
    p, axes, keep = op.number("p", 2.0), op.integers("axes"), op.flag("keepdim", False)
    return lambda x: torch.linalg.vector_norm(x, p, axes or None, keepdim=keep)


def arg(fn: Callable[..., Tensor]) -> Builder:
    """ArgMaxV2 and relatives: index (``dtype``) of the extreme along the axis in input ``dimension``."""

    def build(op: Op) -> Kernel:
        dtype = op.dtype("dtype") if "dtype" in op.attrs else torch.int64
        return lambda x, dimension: fn(x, host_ints(op, 1, dimension)[0]).to(dtype)

    return build


def arg_with_value(largest: bool) -> Builder:
    """ArgMaxWithValue, ArgMinWithValue: (index int32, value) along ``dimension``."""

    def build(op: Op) -> Kernel:
        dim, keep = op.integer("dimension", 0), op.flag("keep_dims", False)

        def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = torch.max(x, dim, keepdim=keep) if largest else torch.min(x, dim, keepdim=keep)
            return indices.to(torch.int32), values

        return kernel

    return build


def top_k(op: Op) -> Kernel:
    """(values, indices int32) of the k largest or smallest along ``dim``, sorted; ties as in torch.topk."""
    dim, largest, ordered = op.integer("dim", -1), op.flag("largest", True), op.flag("sorted", True)

    def kernel(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.topk(x, host_ints(op, 1, k)[0], dim, largest=largest, sorted=ordered)
        return values, indices.to(torch.int32)

    return kernel


def sort(op: Op) -> Kernel:
    """(values, indices int32) along ``axis``; always stable."""
    axis, descending = op.integer("axis", -1), op.flag("descending", False)

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.sort(x, dim=axis, descending=descending, stable=True)
        return values, indices.to(torch.int32)

    return kernel


def cumsum(op: Op) -> Kernel:
    """Running sum along the axis in input 1; exclusive and reverse forms are refused."""
    if op.flag("exclusive", False) or op.flag("reverse", False):
        raise op.error("exclusive or reverse sums are not known to the host engine")
    return lambda x, axis: torch.cumsum(x, host_ints(op, 1, axis)[0], dtype=x.dtype)


def search_sorted(op: Op) -> Kernel:
    """Insertion points of ``values`` into ``sorted_sequence``."""
    right, dtype = op.flag("right", False), op.dtype("dtype")
    return lambda sequence, values, sorter=None: torch.searchsorted(sequence, values, right=right, sorter=sorter).to(
        dtype
    )


_AXES: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceAll": _all,
    "ReduceAny": _any,
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keepdim=keep),
    "ReduceProd": _prod,
    "ReduceSum": _sum,
}

OPS: dict[str, Builder] = {
    **{name: over_axes(fn) for name, fn in _AXES.items()},
    **{f"{name}D": over_axes(fn) for name, fn in _AXES.items()},
    "ArgMaxV2": arg(torch.argmax),
    "ArgMaxWithValue": arg_with_value(largest=True),
    "ArgMin": arg(torch.argmin),
    "ArgMinWithValue": arg_with_value(largest=False),
    "Cumsum": cumsum,
    "LpNormV2": lp_norm,
    "ReduceMeanWithCast": mean_with_cast,
    "ReduceStdWithMean": std_with_mean,
    "SearchSorted": search_sorted,
    "Sort": sort,
    "TopK": top_k,
    "TopKV2": top_k,
}
