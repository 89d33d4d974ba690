"""Operations that are a short formula of operations which torchair lowers: amax, min, all over a dim, xor, roll, …

Each function takes the arguments of the ATen operation that `FORMULAS` maps to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.inline import inline
from cannopy.fx_passes.program import Program

NARROW_FLOATS = (torch.bfloat16, torch.float16)


def run(program: Program, editor: Editor) -> int:
    """Replace every operation of `FORMULAS`."""
    found = [n for n in editor.graph.nodes if n.op == "call_function" and n.target in FORMULAS]
    for node in found:
        inline(editor, node, FORMULAS[node.target])
    return len(found)


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    """The dims of a reduction, non-negative, last first, so that removing one leaves the others in place."""
    rank = max(x.dim(), 1)
    given = range(rank) if dim is None or dim == [] or dim == () else [dim] if isinstance(dim, int) else dim
    return sorted((d % rank for d in given), reverse=True)


def _any(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    for d in _dims(x, dim):
        x = aten.any.dim(x, d, keepdim)
    return x


def _all(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    return aten.logical_not(_any(aten.logical_not(x), dim, keepdim))


def _amax(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    for d in _dims(x, dim):
        x = aten.max.dim(x, d, keepdim)[0]
    return x


def _mirror(x: Tensor) -> Any:
    """A value whose order is the reverse of that of ``x`` and whose mirror is ``x`` again."""
    if x.dtype == torch.bool:
        return aten.logical_not(x)
    return aten.neg(x) if x.is_floating_point() else aten.bitwise_not(x)


def _amin(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
    return _mirror(_amax(_mirror(x), dim, keepdim))


def _min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    values, indices = aten.max.dim(_mirror(x), dim, keepdim)
    return _mirror(values), indices


def _isnan(x: Tensor) -> Any:
    return aten.ne.Tensor(x, x)


def _clamp_max(x: Tensor, most: float) -> Any:
    return aten.clamp(x, None, most)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Any:
    wide = x.to(torch.float32) if x.dtype in NARROW_FLOATS else x
    scaled = wide * beta
    return torch.where(scaled > threshold, wide, torch.log1p(torch.exp(scaled)) / beta).to(x.dtype)


def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    dims = _dims(x, dim)
    wide = x.to(torch.float32) if x.dtype in NARROW_FLOATS else x
    away = wide - torch.mean(wide, dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    return (torch.sum(away * away, dims, keepdim=keepdim) / max(count, 0)).to(x.dtype)


def _logical_xor(x: Tensor, y: Tensor) -> Any:
    return aten.ne.Tensor(aten.ne.Scalar(x, 0), aten.ne.Scalar(y, 0))


def _bitwise_xor(x: Tensor, y: Tensor) -> Any:
    if x.dtype == torch.bool and y.dtype == torch.bool:
        return aten.ne.Tensor(x, y)
    return aten.sub.Tensor(aten.bitwise_or(x, y), aten.bitwise_and(x, y))


def _shift_left(x: Tensor, places: int) -> Any:
    return aten.mul.Tensor(x, 2**places)


def _shift_right(x: Tensor, places: int) -> Any:
    return aten.floor_divide(x, 2**places)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: float) -> Any:
    positions = aten.arange(x.shape[dim], device=x.device)
    chosen = aten.any.dim(aten.eq.Tensor(positions.reshape(-1, 1), index.reshape(1, -1)), 1)
    along = [1] * x.dim()
    along[dim] = x.shape[dim]
    return aten.masked_fill.Scalar(x, chosen.reshape(along), value)


def _trunc(x: Tensor) -> Any:
    return torch.where(x < 0, torch.ceil(x), torch.floor(x))


def _logaddexp(x: Tensor, y: Tensor) -> Any:
    far = torch.maximum(x, y) + torch.log1p(torch.exp(-torch.abs(x - y)))
    # Two equal infinities differ by nan.
    return torch.where(x == y, x + math.log(2), far)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        cut = (size - shift) % size if size else 0
        if cut:
            x = torch.cat([aten.slice.Tensor(x, dim, cut, size), aten.slice.Tensor(x, dim, 0, cut)], dim)
    return x


def _eye(rows: int, columns: int | None = None, **options: Any) -> Any:
    """Ones on the diagonal."""
    device = options.get("device")
    across = aten.arange(rows if columns is None else columns, device=device).reshape(1, -1)
    same = aten.eq.Tensor(aten.arange(rows, device=device).reshape(-1, 1), across)
    return same.to(options.get("dtype") or torch.get_default_dtype())


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten.any.dims: _any,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.min.default: _amin,
    aten.min.dim: _min_dim,
    aten.isnan.default: _isnan,
    aten.clamp_max.default: _clamp_max,
    aten.clamp_max.Tensor: aten.minimum.default,
    aten.clamp_min.Tensor: aten.maximum.default,
    aten.softplus.default: _softplus,
    aten.var.correction: _var,
    aten.logical_xor.default: _logical_xor,
    aten.bitwise_xor.Tensor: _bitwise_xor,
    aten.bitwise_left_shift.Tensor_Scalar: _shift_left,
    aten.bitwise_right_shift.Tensor_Scalar: _shift_right,
    aten.index_fill.int_Scalar: _index_fill,
    aten.trunc.default: _trunc,
    aten.logaddexp.default: _logaddexp,
    aten.roll.default: _roll,
    aten.eye.default: _eye,
    aten.eye.m: _eye,
}
