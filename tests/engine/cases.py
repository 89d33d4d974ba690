"""ATen programs that between them lower to every GE type family of the engine.

Each case is a function of tensors and those tensors' makers; eager PyTorch on the same tensors is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F = torch.nn.functional
BF16 = torch.bfloat16


def _rand(*shape: int, dtype: torch.dtype = torch.float32, low: float = -2.0, high: float = 2.0) -> Tensor:
    return (torch.rand(shape) * (high - low) + low).to(dtype)


@dataclass(frozen=True)
class Case:
    """``ulps``: how far a result may be from eager, in units in the last place of its dtype."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[], tuple[Tensor, ...]]
    ulps: int = 0


def _two(dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_rand(3, 4, dtype=dtype), _rand(3, 4, dtype=dtype))


def _positive(dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_rand(3, 4, dtype=dtype, low=0.1, high=3.0),)


def _one(dtype: torch.dtype, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (_rand(*(shape or (3, 4)), dtype=dtype),)


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
    "view_dtype": lambda x: x.view(torch.int32) + 1,
    "causal": lambda x: torch.arange(8)[None, :] <= torch.arange(3)[:, None] + x[0, :, :1].long(),
    "rotate_half": lambda x: x * 0.5 + torch.cat((-x[..., 4:], x[..., :4]), -1) * 0.25,
    "rotate_interleaved": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "glu": lambda x: F.glu(x, -1),
    "view_last": lambda x: x.view(2, 3, 4, 2).transpose(-1, -2).reshape(2, 3, 8),
    "meshless_slice_set": lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 1, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 2),
}


def _unary_cases() -> list[Case]:
    cases = [Case(f"{n}-{d}", f, _one(dt)) for n, f in UNARY.items() for d, dt in _FLOATS]
    return cases + [Case(f"{n}-{d}", f, _positive(dt)) for n, f in POSITIVE.items() for d, dt in _FLOATS]


_FLOATS = (("f32", torch.float32), ("bf16", BF16))


def _index_cases() -> list[Case]:
    def table() -> tuple[Tensor, Tensor]:
        return _rand(10, 6, dtype=BF16), torch.tensor([[1, 9, 0], [3, 3, 2]])

    def gather() -> tuple[Tensor, Tensor]:
        return _rand(4, 6), torch.randint(0, 6, (4, 3))

    def rows() -> tuple[Tensor, Tensor, Tensor]:
        return _rand(8, 6), torch.tensor([5, 1, 7]), _rand(3, 6)

    return [
        Case("embedding", lambda w, i: F.embedding(i, w), table),
        Case("index", lambda w, i: w[i], table),
        Case("index_select", lambda w, i, u: w.index_select(0, i) + u, rows),
        Case("index_select_1", lambda w, i, u: w.index_select(1, i % 6), rows),
        Case("index_two", lambda w, i, u: w[i, i % 6], rows),
        Case("index_dim1", lambda w, i, u: w[:, i % 6], rows),
        Case("gather", lambda x, i: x.gather(1, i), gather),
        Case("scatter_src", lambda x, i: x.scatter(1, i, torch.ones(4, 3)), gather),
        Case("scatter_value", lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0), gather),
        Case("scatter_inf", lambda x, i: torch.full_like(x, float("-inf")).scatter(-1, i, 0.0), gather),
        Case("scatter_add", lambda x, i: x.scatter_add(1, i, torch.ones(4, 3)), gather),
        Case("index_add", lambda w, i, u: w.index_add(0, i, u), rows),
        Case("mask_scatter", lambda w, i, u: torch.where(torch.arange(8)[:, None] == i[0], u[:1], w), rows),
        Case("searchsorted", lambda w, i, u: torch.searchsorted(torch.arange(8).float(), u), rows),
    ]


def _matmul_cases() -> list[Case]:
    def mm(dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (_rand(5, 16, dtype=dtype), _rand(16, 7, dtype=dtype), _rand(7, dtype=dtype))

    def bmm(dtype: torch.dtype) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (_rand(3, 5, 16, dtype=dtype), _rand(3, 16, 7, dtype=dtype))

    def attention() -> tuple[Tensor, ...]:
        return tuple(_rand(2, 4, 6, 16, dtype=BF16) for _ in range(3))

    cases: list[Case] = []
    for d, dt in _FLOATS:
        cases += [
            Case(f"mm-{d}", lambda a, b, c: a @ b, mm(dt)),
            Case(f"mm_t-{d}", lambda a, b, c: F.linear(a, b.t().contiguous()), mm(dt), ulps=1),
            Case(f"linear_bias-{d}", lambda a, b, c: F.linear(a, b.t(), c), mm(dt)),
            Case(f"addmm-{d}", lambda a, b, c: torch.addmm(c, a, b), mm(dt)),
            Case(f"addmm_beta-{d}", lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0), mm(dt), ulps=2),
            Case(f"bmm-{d}", torch.bmm, bmm(dt)),
            Case(f"matmul3-{d}", lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2)[:, :5, :5].mT.mT[:, :, :5], lambda dt=dt: (_rand(3, 5, 16, dtype=dt), _rand(3, 5, 16, dtype=dt))),
            Case(f"baddbmm-{d}", lambda a, b: torch.baddbmm(torch.ones(3, 5, 7, dtype=a.dtype), a, b), bmm(dt), ulps=1),
            Case(f"linear3d-{d}", lambda a, b: F.linear(a, b[0].t()), bmm(dt)),
            Case(f"einsum-{d}", lambda a, b: torch.einsum("bij,bjk->bik", a, b), bmm(dt)),
        ]
    cases.append(Case("attention_by_hand", lambda q, k, v: torch.softmax((q @ k.mT).float() * 0.25, -1).to(BF16) @ v, attention))
    return cases


def _weighted_norm(x: Tensor) -> Any:
    w = torch.arange(8, dtype=x.dtype)
    return F.layer_norm(x, (8,), w, w + 1)


ALL: list[Case] = [
    *_unary_cases(),
    *(Case(f"{n}-{d}", f, _two(dt)) for n, f in BINARY.items() for d, dt in _FLOATS),
    *(Case(n, f, _ints) for n, f in INTEGER.items()),
    *(Case(n, f, _bools) for n, f in BOOLEAN.items()),
    *(Case(f"{n}-{d}", f, _one(dt, 2, 3, 8)) for n, f in REDUCE.items() for d, dt in _FLOATS),
    *(Case(n, f, _one(torch.float32, 2, 3, 8)) for n, f in SHAPE.items()),
    *(Case(f"layer_norm_weighted-{d}", _weighted_norm, _one(dt, 2, 3, 8)) for d, dt in _FLOATS),
    *_index_cases(),
    *_matmul_cases(),
]
