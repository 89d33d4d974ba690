"""ATen programs that between them lower to every GE type of the engine that ATen ops lower to.

The programs of a group read the same tensors and are compiled as one graph; eager PyTorch on the same tensors is the
oracle of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

F = torch.nn.functional
BF16 = torch.bfloat16


def _rand(*shape: int, dtype: torch.dtype = torch.float32, low: float = -2.0, high: float = 2.0) -> Tensor:
    return (torch.rand(shape) * (high - low) + low).to(dtype)


Program = Callable[..., Any]
Make = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Group:
    """``ulps`` by program: how far a result may be from eager, in units in the last place of the largest result.

    0, the default, is bit for bit. A program is given more only where the lowered graph rounds at other places than
    the eager op (a bias added after the product, for example), and then one or two.
    """

    name: str
    programs: dict[str, Program]
    make: Make
    ulps: dict[str, int] = field(default_factory=dict)


def _many(dtype: torch.dtype, count: int, *shape: int, low: float = -2.0, high: float = 2.0) -> Make:
    return lambda: tuple(_rand(*shape, dtype=dtype, low=low, high=high) for _ in range(count))


def _ints() -> tuple[Tensor, Tensor]:
    return torch.randint(-20, 20, (3, 4)), torch.randint(1, 7, (3, 4))


def _bools() -> tuple[Tensor, Tensor]:
    return torch.rand(3, 4) > 0.5, torch.rand(3, 4) > 0.5


UNARY: dict[str, Callable[[Tensor], Any]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "cos": torch.cos,
    "sin": torch.sin,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "sign": torch.sign,
    "square": torch.square,
    "expm1": torch.expm1,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardtanh": F.hardtanh,
    "isinf": torch.isinf,
    "logical_not": torch.logical_not,
}
POSITIVE: dict[str, Callable[[Tensor], Any]] = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "pow_scalar": lambda x: x.pow(1.5),
    "pow_2": lambda x: x.pow(2),
    "pow_3": lambda x: x**3,
    "pow_base": lambda x: torch.pow(2.0, x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "rsub": lambda a, b: 1 - a + b,
    "clamp": lambda a, b: torch.clamp(a, -1.0, 0.5) + b,
    "clamp_min": lambda a, b: a.clamp_min(0.25) + b,
    "add_scalar": lambda a, b: a + 3 + b * 0.5,
    "div_scalar": lambda a, b: a / 3 + b,
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b + 3, value=0.5),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.5),
    "where": lambda a, b: torch.where(a > b, a, b),
    "where_scalar": lambda a, b: torch.where(a > b, 0.0, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, float("-inf")),
    "broadcast": lambda a, b: a[:, None, :] * b[None, :, :1],
    "isclose": lambda a, b: (a - b).abs() < 0.5,
    "floor_divide": lambda a, b: torch.floor_divide(a, b),
    "remainder": lambda a, b: torch.remainder(a, b),
}
INTEGER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "int_arith": lambda a, b: (a + b, a - b, a * b),
    "int_floor_divide": lambda a, b: a // b,
    "int_floor_divide_scalar": lambda a, b: a // 4,
    "int_remainder": lambda a, b: a % b,
    "int_remainder_scalar": lambda a, b: a % 5,
    "int_true_divide": lambda a, b: a / b,
    "int_trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_not": lambda a, b: torch.bitwise_not(a),
    "int_compare": lambda a, b: (a < b, a == b, a >= 2),
    "int_minmax": lambda a, b: (torch.maximum(a, b), a.clamp(min=0), a.clamp(0, 3)),
    "int_sum": lambda a, b: (a.sum(), a.sum(-1)),
    "int_abs_neg": lambda a, b: (a.abs(), -b),
    "int_cast": lambda a, b: (a.to(torch.int32), a.float(), b.to(BF16), a.bool(), a.to(torch.int8)),
    "int_pow": lambda a, b: b**2,
}
BOOLEAN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "bool_not": lambda a, b: ~a,
    "bool_and": lambda a, b: a & b,
    "bool_or": lambda a, b: a | b,
    "any_all": lambda a, b: (a.any(), a.any(-1), b.all()),
    "bool_sum": lambda a, b: (a.sum(-1), a.float(), a.long()),
    "bool_eq": lambda a, b: a == b,
}
REDUCE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True)),
    "mean": lambda x: (x.mean(), x.mean(-1, keepdim=True), x.mean((0, 1))),
    "max_dim": lambda x: torch.max(x, -1),
    "max_all": lambda x: x.max(),
    "argmax": lambda x: (x.argmax(-1), x.argmax(1, keepdim=True), x.argmin(0)),
    "argmin_keep": lambda x: x.argmin(1, keepdim=True),
    "mean_f32": lambda x: x.mean(-1, dtype=torch.float32),
    "argmax_flat": lambda x: x.argmax(),
    "cumsum": lambda x: (x.cumsum(-1), x.cumsum(0)),
    "softmax": lambda x: (x.softmax(-1), x.softmax(1)),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "std": lambda x: x.std(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_by_hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "topk": lambda x: torch.topk(x, 3, -1),
    "topk_dim1": lambda x: torch.topk(x, 2, 1),
    "topk_smallest": lambda x: torch.topk(x, 3, largest=False),
    "sort": lambda x: torch.sort(x, -1),
    "sort_desc": lambda x: torch.sort(x, -1, descending=True),
}
SHAPE: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(6, 8) + 1,
    "reshape_t": lambda x: x.transpose(0, 1).reshape(3, 16) + 1,
    "permute": lambda x: x.permute(2, 0, 1) + 1,
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(1) + 1,
    "squeeze": lambda x: (x[:, :1].squeeze(1) + 1, x.unsqueeze(0).squeeze(0) * 2),
    "expand": lambda x: x[:, :1].expand(2, 3, 8) + 1,
    "expand_new": lambda x: x.expand(4, 2, 3, 8) + 1,
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "cat": lambda x: torch.cat([x, x * 2, x + 1], dim=1),
    "cat_last": lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=-1),
    "stack": lambda x: torch.stack([x, x * 2], dim=1),
    "split": lambda x: [c + 1 for c in x.split(3, dim=-1)],
    "split_sizes": lambda x: [c + 1 for c in x.split([1, 5, 2], dim=-1)],
    "chunk": lambda x: [c * 2 for c in x.chunk(2, dim=-1)],
    "unbind": lambda x: [c + 1 for c in x.unbind(1)],
    "slice": lambda x: (x[:, 1:] + 1, x[..., 2:7:2] + 1, x[:, -2:] * 2),
    "select": lambda x: (x[0] + 1, x[:, 1] + 1, x[..., -1] + 1),
    "flip": lambda x: x.flip(-1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_value": lambda x: F.pad(x, (0, 1, 2, 0), value=3.0),
    "tril": lambda x: (x.tril(), x.triu(1)),
    "flatten": lambda x: x.flatten(1) + 1,
    "clone": lambda x: x.clone(),
    "zeros_like": lambda x: (torch.zeros_like(x) + x, torch.ones_like(x) * x, torch.full_like(x, 2.5)),
    "new_zeros": lambda x: x.new_zeros(4, 2) + 1,
    "full": lambda x: torch.full((2, 3, 8), 0.25) + x,
    "arange": lambda x: (torch.arange(8) + x.long(), torch.arange(1, 9, dtype=torch.float32) * x),
    "arange_step": lambda x: torch.arange(0, 16, 2) + x,
    "cast": lambda x: (x.to(BF16), x.half(), x.double(), x.to(torch.int32)),
    "cast_back": lambda x: x.to(BF16).float(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 4) + 1,
    "empty": lambda x: x.new_empty(3, 2).fill_(2.0),
    "cast_f8": lambda x: x.to(torch.float8_e4m3fn).float(),
    "causal": lambda x: torch.arange(8)[None, :] <= torch.arange(3)[:, None] + x[0, :, :1].long(),
    "rotate_half": lambda x: x * 0.5 + torch.cat((-x[..., 4:], x[..., :4]), -1) * 0.25,
    "rotate_interleaved": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "glu": lambda x: F.glu(x, -1),
    "view_last": lambda x: x.view(2, 3, 4, 2).transpose(-1, -2).reshape(2, 3, 8),
    "meshless_slice_set": lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 1, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 2),
}

REINTERPRETED: dict[str, Program] = {"view_dtype": lambda x: x.view(torch.int32) + 1}
"""torchair has no converter for it in every version."""

ACOS_ASIN: dict[str, Program] = {"acos": torch.acos, "asin": torch.asin}

INDEX: dict[str, Program] = {
    "index_select": lambda w, i, u: w.index_select(0, i) + u,
    "index_select_1": lambda w, i, u: w.index_select(1, i % 6),
    "index": lambda w, i, u: w[i],
    "index_2d": lambda w, i, u: w[torch.stack([i, i])],
    "index_two": lambda w, i, u: w[i, i % 6],
    "index_dim1": lambda w, i, u: w[:, i % 6],
    "embedding": lambda w, i, u: F.embedding(i, w),
    "index_add": lambda w, i, u: w.index_add(0, i, u),
    "row_by_mask": lambda w, i, u: torch.where(torch.arange(8)[:, None] == i[0], u[:1], w),
    "searchsorted": lambda w, i, u: torch.searchsorted(torch.arange(8).float(), u.float()),
}
GATHER: dict[str, Program] = {
    "gather": lambda x, i: x.gather(1, i),
    "scatter_src": lambda x, i: x.scatter(1, i, torch.ones(4, 3, dtype=x.dtype)),
    "scatter_value": lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0),
    "scatter_inf": lambda x, i: torch.full_like(x, float("-inf")).scatter(-1, i, 0.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i, torch.ones(4, 3, dtype=x.dtype)),
}
MATRIX: dict[str, Program] = {
    "mm": lambda a, b, c: a @ b,
    "mm_t": lambda a, b, c: F.linear(a, b.t().contiguous()),
    "linear_bias": lambda a, b, c: F.linear(a, b.t(), c),
    "addmm": lambda a, b, c: torch.addmm(c, a, b),
    "addmm_beta": lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
}
BATCHED: dict[str, Program] = {
    "bmm": torch.bmm,
    "matmul4": lambda a, b: torch.matmul(a[None], b[None]),
    "baddbmm": lambda a, b: torch.baddbmm(torch.ones(3, 5, 7, dtype=a.dtype), a, b),
    "linear3d": lambda a, b: F.linear(a, b[0].t()),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", a, b),
    "broadcast": lambda a, b: torch.matmul(a, b[:1]),
}
ATTENTION: dict[str, Program] = {
    "by_hand": lambda q, k, v: torch.softmax((q @ k.mT).float() * 0.25, -1).to(BF16) @ v,
    "masked": lambda q, k, v: torch.softmax((q @ k.mT + torch.full((6, 6), -1e4, dtype=BF16).triu(1)), -1) @ v,
}


def _weighted_norm(x: Tensor) -> Any:
    w = torch.arange(8, dtype=x.dtype)
    return F.layer_norm(x, (8,), w, w + 1)


CONVOLUTION: dict[str, Program] = {
    "depthwise": lambda x, w, b: F.conv1d(x, w, padding=3, groups=6),
    "step of a state": lambda x, w, b: F.conv1d(x[..., -4:], w, b, groups=6),
    "strided": lambda x, w, b: F.conv1d(x, w.expand(6, 2, 4), b, stride=2, padding=2, groups=3),
    "dilated": lambda x, w, b: F.conv1d(x, w.expand(6, 6, 4), dilation=2),
    "two dims": lambda x, w, b: F.conv2d(x[:, :, None], w[..., None, :3], b, padding=(0, 1), groups=6),
}


def _groups(tag: str, dtype: torch.dtype) -> list[Group]:
    def rows() -> tuple[Tensor, ...]:
        return _rand(8, 6, dtype=dtype), torch.tensor([5, 1, 7]), _rand(3, 6, dtype=dtype)

    def places() -> tuple[Tensor, ...]:
        distinct = torch.stack([torch.randperm(6)[:3] for _ in range(4)])
        return _rand(4, 6, dtype=dtype), distinct

    def matrices() -> tuple[Tensor, ...]:
        return _rand(5, 16, dtype=dtype), _rand(16, 7, dtype=dtype), _rand(7, dtype=dtype)

    def sequences() -> tuple[Tensor, ...]:
        return _rand(2, 6, 9, dtype=dtype), _rand(6, 1, 4, dtype=dtype), _rand(6, dtype=dtype)

    def batches() -> tuple[Tensor, ...]:
        return _rand(3, 5, 16, dtype=dtype), _rand(3, 16, 7, dtype=dtype)

    reductions = {**REDUCE, "layer_norm_weighted": _weighted_norm}
    product_ulps = {"mm_t": 1, "linear_bias": 2, "addmm": 2, "addmm_beta": 2}
    return [
        Group(f"unary-{tag}", UNARY, _many(dtype, 1, 3, 4)),
        Group(f"positive-{tag}", POSITIVE, _many(dtype, 1, 3, 4, low=0.1, high=3.0)),
        Group(f"arc-{tag}", ACOS_ASIN, _many(dtype, 1, 3, 4, low=-1.0, high=1.0)),
        Group(f"binary-{tag}", BINARY, _many(dtype, 2, 3, 4), {"addcdiv": 1}),
        Group(f"reduce-{tag}", reductions, _many(dtype, 1, 2, 3, 8)),
        Group(f"index-{tag}", INDEX, rows),
        Group(f"gather-{tag}", GATHER, places),
        Group(f"matrix-{tag}", MATRIX, matrices, product_ulps),
        Group(f"convolution-{tag}", CONVOLUTION, sequences, dict.fromkeys(CONVOLUTION, 2)),
        Group(f"batched-{tag}", BATCHED, batches, {"baddbmm": 2}),
    ]


GROUPS: list[Group] = [
    *_groups("f32", torch.float32),
    *_groups("bf16", BF16),
    Group("integer", INTEGER, _ints),
    Group("boolean", BOOLEAN, _bools),
    Group("shape", SHAPE, _many(torch.float32, 1, 2, 3, 8)),
    Group("reinterpreted", REINTERPRETED, _many(torch.float32, 1, 2, 3, 8)),
    Group("attention", ATTENTION, _many(BF16, 3, 2, 4, 6, 16)),
]
