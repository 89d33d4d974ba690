"""Elementwise ops of one input: y = f(x), computed in x's dtype (fp32 inside for half precision, rounded once)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def plain(fn: Callable[[Tensor], Tensor]) -> Builder:
    """A type without attributes."""
    return lambda op: fn


def exp(op: Op) -> Kernel:
    """y = base ** (scale * x + shift); base -1 stands for e."""
    base, scale, shift = op.number("base", -1.0), op.number("scale", 1.0), op.number("shift", 0.0)
    if (base, scale, shift) == (-1.0, 1.0, 0.0):
        return torch.exp
    if base == -1.0:
        return lambda x: torch.exp(x.float() * scale + shift).to(x.dtype)
    return lambda x: torch.pow(base, x.float() * scale + shift).to(x.dtype)


def log(op: Op) -> Kernel:
    """y = log_base(scale * x + shift); base -1 stands for e."""
    base, scale, shift = op.number("base", -1.0), op.number("scale", 1.0), op.number("shift", 0.0)
    if (scale, shift) != (1.0, 0.0):
        raise op.error(f"scale {scale} and shift {shift} are not known to the host engine, only 1 and 0")
    known: dict[float, Callable[[Tensor], Tensor]] = {-1.0: torch.log, 2.0: torch.log2, 10.0: torch.log10}
    if base not in known:
        raise op.error(f"base {base} is not known to the host engine, only e (-1), 2 and 10")
    return known[base]


def gelu(op: Op) -> Kernel:
    """The tanh form: that is what the GE op Gelu computes, whichever form ATen asked for."""
    return lambda x: functional.gelu(x, approximate="tanh")


def gelu_v2(op: Op) -> Kernel:
    """Attribute ``approximate``: none or tanh."""
    approximate = op.text("approximate", "none")
    if approximate not in {"none", "tanh"}:
        raise op.error(f"approximate is {approximate!r}, expected none or tanh")
    return lambda x: functional.gelu(x, approximate=approximate)


def fast_gelu(op: Op) -> Kernel:
    """y = x * sigmoid(1.702 x)."""
    return lambda x: (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def swish(op: Op) -> Kernel:
    """y = x * sigmoid(scale * x)."""
    scale = op.number("scale", 1.0)
    if scale == 1.0:
        return functional.silu
    return lambda x: (x.float() * torch.sigmoid(scale * x.float())).to(x.dtype)


def leaky_relu(op: Op) -> Kernel:
    """y = x where x > 0, else negative_slope * x."""
    slope = op.number("negative_slope", 0.0)
    return lambda x: functional.leaky_relu(x, slope)


def elu(op: Op) -> Kernel:
    """y = scale * x where x > 0, else scale * alpha * (exp(input_scale * x) - 1)."""
    alpha, scale, input_scale = op.number("alpha", 1.0), op.number("scale", 1.0), op.number("input_scale", 1.0)

    def kernel(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten.elu(x, alpha, scale, input_scale)
        return y

    return kernel


def hard_sigmoid(op: Op) -> Kernel:
    """y = min(max(alpha * x + beta, 0), 1); only ATen's alpha 1/6 and beta 1/2."""
    alpha, beta = op.number("alpha", 1 / 6), op.number("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-7 or beta != 0.5:
        raise op.error(f"alpha {alpha} and beta {beta} are not known to the host engine, only 1/6 and 1/2")
    return functional.hardsigmoid


def scalar(fn: Callable[[Tensor, float], Tensor]) -> Builder:
    """A type with a number in attribute ``value``: y = fn(x, value)."""

    def build(op: Op) -> Kernel:
        value = op.number("value", 0.0)
        return lambda x: fn(x, value)

    return build


def cast(op: Op) -> Kernel:
    """Convert to ``dst_type``; floats to integers toward zero, anything to bool as x != 0."""
    dtype = op.dtype("dst_type")
    return lambda x: x.to(dtype)


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "Invert": torch.bitwise_not,
    "IsInf": torch.isinf,
    "Log1p": torch.log1p,
    "LogSigmoid": functional.logsigmoid,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Square": torch.square,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
    "ZerosLike": torch.zeros_like,
    "OnesLike": torch.ones_like,
}

OPS: dict[str, Builder] = {
    **{name: plain(fn) for name, fn in _PLAIN.items()},
    "Cast": cast,
    "Elu": elu,
    "Exp": exp,
    "FastGelu": fast_gelu,
    "Gelu": gelu,
    "GeluV2": gelu_v2,
    "HardSigmoid": hard_sigmoid,
    "LeakyRelu": leaky_relu,
    "Log": log,
    "Muls": scalar(torch.mul),
    "Swish": swish,
}
