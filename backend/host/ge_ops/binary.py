"""Elementwise ops of two or more inputs, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cannopy.backend.host.ge_ops.op import Builder, Kernel, Op, Tensor


def plain(fn: Callable[..., Tensor]) -> Builder:
    """A type without attributes that matter."""
    return lambda op: fn


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point() or b.is_floating_point():
        return torch.div(a, b)
    return torch.div(a, b, rounding_mode="trunc")


def _truncate_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def power(op: Op) -> Kernel:
    """y = x1 ** x2. A constant one-element side is a number to PyTorch, which then takes its exact short cuts."""
    base, exponent = op.consts.get(0), op.consts.get(1)
    if exponent is not None and exponent.numel() == 1 and base is None:
        number = exponent.item()
        return lambda x1, x2: torch.pow(x1, number)
    return torch.pow


def axpy_v2(op: Op) -> Kernel:
    """y = x1 + alpha * x2, alpha a one-element tensor."""
    return lambda x1, x2, alpha: torch.add(x1, x2, alpha=alpha.item())


def axpy(op: Op) -> Kernel:
    """y = x1 + alpha * x2, alpha an attribute."""
    alpha = op.number("alpha", 1.0)
    return lambda x1, x2: torch.add(x1, x2, alpha=alpha)


def sxpy(op: Op) -> Kernel:
    """y = x1 - alpha * x2."""
    return lambda x1, x2, alpha: torch.sub(x1, x2, alpha=alpha.item())


def lerp(op: Op) -> Kernel:
    """y = start + weight * (end - start); a one-element weight is a number to eager as well."""
    return lambda start, end, weight: torch.lerp(start, end, weight.item() if weight.dim() == 0 else weight)


def addcmul(op: Op) -> Kernel:
    """y = input_data + value * x1 * x2."""
    return lambda base, x1, x2, value: torch.addcmul(base, x1, x2, value=value.item())


def addcdiv(op: Op) -> Kernel:
    """y = input_data + value * x1 / x2."""
    return lambda base, x1, x2, value: torch.addcdiv(base, x1, x2, value=value.item())


def clip(op: Op) -> Kernel:
    """y = min(max(x, clip_value_min), clip_value_max)."""
    return lambda x, low, high: torch.clamp(x, low, high)


def select(op: Op) -> Kernel:
    """y = then where condition else otherwise."""
    return lambda condition, then, otherwise: torch.where(condition, then, otherwise)


def masked_fill(op: Op) -> Kernel:
    """y = x with ``value`` where mask."""
    return lambda x, mask, value: torch.where(mask, value.to(x.dtype), x)


_PLAIN: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "AddV2": torch.add,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "Div": _divide,
    "Equal": torch.eq,
    "FloorDiv": torch.floor_divide,
    "FloorMod": torch.remainder,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mod": torch.fmod,
    "Mul": torch.mul,
    "NotEqual": torch.ne,
    "RealDiv": torch.div,
    "RightShift": torch.bitwise_right_shift,
    "Sub": torch.sub,
    "TruncateDiv": _truncate_divide,
}

OPS: dict[str, Builder] = {
    **{name: plain(fn) for name, fn in _PLAIN.items()},
    "Addcdiv": addcdiv,
    "Addcmul": addcmul,
    "Axpy": axpy,
    "AxpyV2": axpy_v2,
    "ClipByValueV2": clip,
    "Lerp": lerp,
    "MaskedFill": masked_fill,
    "Pow": power,
    "Select": select,
    "SelectV2": select,
    "Sxpy": sxpy,
}
