"""Mutations of RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, dtype, is_call, shape
from cannopy.fx_passes.program import Program
from tests.mutation.operators import NORM, Edit, NotHereError, Operator, calls, through, user


@dataclass
class Norm:
    """The nodes of one RMSNorm."""

    wide: fx.Node
    square: fx.Node
    mean: fx.Node
    plus: fx.Node
    rsqrt: fx.Node
    normed: fx.Node
    rounded: fx.Node
    scaled: fx.Node
    gamma: fx.Node


def norms(p: Program) -> list[Norm]:
    """Every RMSNorm of the program."""
    found = []
    for rsqrt in calls(p, aten.rsqrt.default):
        plus = rsqrt.args[0]
        if not is_call(plus, aten.add.Tensor) or not is_call(plus.args[0], aten.mean.dim):
            continue
        mean = plus.args[0]
        square, normed = mean.args[0], user(rsqrt, aten.mul.Tensor)
        rounded = user(normed, aten._to_copy.default) or normed
        scaled = user(rounded, aten.mul.Tensor)
        if scaled is None:
            continue
        gamma = next(a for a in scaled.args if a is not rounded)
        found.append(Norm(square.args[0], square, mean, plus, rsqrt, normed, rounded, scaled, gamma))
    return found


def _eps(e: Edit, n: Norm) -> None:
    e.set_arg(n.plus, 1, e.typical(n.mean) * e.rng.uniform(0.3, 3))


def _no_eps(e: Edit, n: Norm) -> None:
    e.bypass(n.plus, n.mean)


def _eps_tensor(e: Edit, n: Norm) -> None:
    eps = e.before(n.plus, aten.full.default, [], e.typical(n.mean), dtype=torch.float32)
    e.set_arg(n.plus, 1, eps)


def _eps_argument(e: Edit, n: Norm) -> None:
    e.set_arg(n.plus, 1, e.argument(torch.tensor(e.typical(n.mean))))


def _eps_outside(e: Edit, n: Norm) -> None:
    e.bypass(n.plus, n.mean)
    e.after(n.rsqrt, aten.add.Tensor, e.typical(n.rsqrt))


def _eps_subtracted(e: Edit, n: Norm) -> None:
    e.become(n.plus, aten.sub.Tensor, n.mean, 0.001 * e.typical(n.mean))


def _sqrt_div(e: Edit, n: Norm) -> None:
    e.become(n.rsqrt, aten.sqrt.default, n.plus)
    e.become(n.normed, aten.div.Tensor, n.wide, n.rsqrt)


def _sqrt_reciprocal(e: Edit, n: Norm) -> None:
    root = e.before(n.rsqrt, aten.sqrt.default, n.plus)
    e.become(n.rsqrt, aten.reciprocal.default, root)


def _pow_half(e: Edit, n: Norm) -> None:
    e.become(n.rsqrt, aten.pow.Tensor_Scalar, n.plus, -0.5)


def _square_as_mul(e: Edit, n: Norm) -> None:
    e.become(n.square, aten.mul.Tensor, n.wide, n.wide)


def _sum(e: Edit, n: Norm) -> None:
    e.become(n.mean, aten.sum.dim_IntList, n.square, [-1], True)


def _sum_over_size(e: Edit, n: Norm) -> None:
    e.become(n.mean, aten.sum.dim_IntList, n.square, [-1], True)
    e.after(n.mean, aten.div.Tensor, shape(n.wide)[-1])


def _other_dim(e: Edit, n: Norm) -> None:
    rank = len(shape(n.wide))
    dims = [d for d in range(rank - 1) if shape(n.wide)[d] > 1]
    if not dims:
        raise NotHereError
    e.become(n.mean, aten.mean.dim, n.square, [e.rng.choice(dims)], True)


def _two_dims(e: Edit, n: Norm) -> None:
    if len(shape(n.wide)) < 2 or shape(n.wide)[-2] == 1:
        raise NotHereError
    e.become(n.mean, aten.mean.dim, n.square, [-2, -1], True)


def _power(e: Edit, n: Norm) -> None:
    e.set_arg(n.square, 1, e.rng.choice([4, 6]))


def _magnitude(e: Edit, n: Norm) -> None:
    e.become(n.square, aten.abs.default, n.wide)


def _centred(e: Edit, n: Norm) -> None:
    middle = e.before(n.square, aten.mean.dim, n.wide, [-1], True)
    moved = e.before(n.square, aten.sub.Tensor, n.wide, middle)
    e.swap_input(n.square, n.wide, moved)
    if e.rng.random() < 0.5:
        e.swap_input(n.normed, n.wide, moved)


def _part_of_row(e: Edit, n: Norm) -> None:
    size = shape(n.wide)[-1]
    e.swap_input(n.square, n.wide, e.before(n.square, aten.slice.Tensor, n.wide, len(shape(n.wide)) - 1, 0, size // 4))


def _gamma_before_cast(e: Edit, n: Norm) -> None:
    if n.rounded is n.normed:
        raise NotHereError
    product = e.before(n.rounded, aten.mul.Tensor, n.normed, n.gamma)
    e.swap_input(n.rounded, n.normed, product)
    e.bypass(n.scaled, n.rounded)


def _gamma_wide(e: Edit, n: Norm) -> None:
    if n.rounded is n.normed:
        raise NotHereError
    gamma = e.before(n.rounded, aten._to_copy.default, n.gamma, dtype=torch.float32)
    product = e.before(n.rounded, aten.mul.Tensor, gamma, n.normed)
    e.swap_input(n.rounded, n.normed, product)
    e.bypass(n.scaled, n.rounded)


def _one_plus_gamma(e: Edit, n: Norm) -> None:
    e.swap_input(n.scaled, n.gamma, e.before(n.scaled, aten.add.Tensor, n.gamma, 1.0))


def _one_plus_gamma_wide(e: Edit, n: Norm) -> None:
    """The Gemma family."""
    _one_plus_gamma(e, n)
    plus = next(a for a in n.scaled.args if is_call(a, aten.add.Tensor))
    if n.rounded is n.normed:
        return
    wide = e.before(plus, aten._to_copy.default, n.gamma, dtype=torch.float32)
    e.swap_input(plus, n.gamma, wide)
    product = e.before(n.rounded, aten.mul.Tensor, n.normed, plus)
    e.swap_input(n.rounded, n.normed, product)
    e.bypass(n.scaled, n.rounded)


def _no_gamma(e: Edit, n: Norm) -> None:
    e.bypass(n.scaled, n.rounded)


def _gamma_scaled(e: Edit, n: Norm) -> None:
    e.swap_input(n.scaled, n.gamma, e.before(n.scaled, aten.mul.Tensor, n.gamma, e.factor()))


def _gamma_constant(e: Edit, n: Norm) -> None:
    e.become(n.scaled, aten.mul.Tensor, n.rounded, e.factor())


def _gamma_one_entry(e: Edit, n: Norm) -> None:
    e.swap_input(n.scaled, n.gamma, e.before(n.scaled, aten.slice.Tensor, n.gamma, 0, 0, 1))


def _gamma_per_row(e: Edit, n: Norm) -> None:
    size = shape(n.scaled)
    rows = (*size[:-1], e.rng.choice([1, size[-1]]))
    e.swap_input(n.scaled, n.gamma, e.argument(e.noise(*rows, dtype=dtype(n.gamma))))


def _gamma_leading_dims(e: Edit, n: Norm) -> None:
    """[1, D] and [1, 1, D] multiply as [D] does."""
    size = [1] * e.rng.randint(1, len(shape(n.scaled)) - 1) + list(shape(n.gamma))
    e.swap_input(n.scaled, n.gamma, e.before(n.scaled, aten.reshape.default, n.gamma, size))


def _gamma_argument(e: Edit, n: Norm) -> None:
    """Weights that change from call to call."""
    e.swap_input(n.scaled, n.gamma, e.argument(e.noise(*shape(n.gamma), dtype=dtype(n.gamma))))


def _gamma_negative(e: Edit, n: Norm) -> None:
    e.swap_input(n.scaled, n.gamma, e.before(n.scaled, aten.neg.default, n.gamma))


def _bias(e: Edit, n: Norm) -> None:
    e.after(n.scaled, aten.add.Tensor, e.argument(e.noise(shape(n.gamma)[-1], dtype=dtype(n.scaled))))


def _gated(e: Edit, n: Norm) -> None:
    gate = e.before(n.scaled, aten.silu.default, through(n.wide, aten._to_copy.default))
    e.after(n.scaled, aten.mul.Tensor, gate)


def _gated_inside(e: Edit, n: Norm) -> None:
    gate = e.before(n.normed, aten.sigmoid.default, n.wide)
    e.after(n.normed, aten.mul.Tensor, gate)


def _rsqrt_of_row(e: Edit, n: Norm) -> None:
    """One token's statistics for all: the size-1 dim broadcasts."""
    rank = len(shape(n.rsqrt))
    dims = [d for d in range(rank - 1) if shape(n.rsqrt)[d] > 1]
    if not dims:
        raise NotHereError
    e.swap_input(n.normed, n.rsqrt, e.before(n.normed, aten.slice.Tensor, n.rsqrt, e.rng.choice(dims), 0, 1))


def _narrow_statistics(e: Edit, n: Norm) -> None:
    source = through(n.wide, aten._to_copy.default)
    if source is n.wide:
        raise NotHereError
    e.swap_input(n.square, n.wide, source)


def _other_source(e: Edit, n: Norm) -> None:
    """Statistics of one tensor scale another."""
    e.swap_input(n.normed, n.wide, e.before(n.normed, aten.mul.Tensor, n.wide, e.factor()))


def _clamped(e: Edit, n: Norm) -> None:
    e.after(n.mean, aten.clamp_min.default, e.typical(n.mean) * e.rng.uniform(0.5, 2))


def _half_precision(e: Edit, n: Norm) -> None:
    if n.rounded is n.normed:
        raise NotHereError
    half = e.before(n.rounded, aten._to_copy.default, n.normed, dtype=torch.float16)
    e.swap_input(n.rounded, n.normed, half)


def _fp32_gamma(e: Edit, n: Norm) -> None:
    """An fp32 norm weight in a 16-bit model: the product is fp32 and rounded afterwards."""
    if n.rounded is n.normed:
        raise NotHereError
    narrow = dtype(n.scaled)
    fp32 = e.argument(e.noise(*shape(n.gamma)) * 0.3 + 1)
    e.swap_input(n.scaled, n.gamma, fp32)
    e.editor.refresh(n.scaled)
    e.after(n.scaled, aten._to_copy.default, dtype=narrow)


EPS = ("eps", "mean.dim", "add.Tensor", "the mean", "rsqrt")
GAMMA = ("gamma",)
OPERATORS = (
    Operator("norm_eps", NORM, norms, _eps, legal=True),
    Operator("norm_without_eps", NORM, norms, _no_eps, legal=True, same=True),
    Operator("norm_eps_constant_tensor", NORM, norms, _eps_tensor, legal=True),
    Operator("norm_eps_from_outside", NORM, norms, _eps_argument, words=EPS),
    Operator("norm_eps_after_root", NORM, norms, _eps_outside, words=EPS),
    Operator("norm_eps_subtracted", NORM, norms, _eps_subtracted, words=EPS, same=True),
    Operator("norm_divides_by_root", NORM, norms, _sqrt_div, legal=True, same=True),
    Operator("norm_reciprocal_root", NORM, norms, _sqrt_reciprocal, legal=True, same=True),
    Operator("norm_power_minus_half", NORM, norms, _pow_half, legal=True, same=True),
    Operator("norm_square_as_product", NORM, norms, _square_as_mul, legal=True, same=True),
    Operator("norm_sum_instead_of_mean", NORM, norms, _sum, words=EPS),
    Operator("norm_sum_over_size", NORM, norms, _sum_over_size, legal=True, same=True),
    Operator("norm_mean_over_other_dim", NORM, norms, _other_dim, words=("the mean is over",)),
    Operator("norm_mean_over_two_dims", NORM, norms, _two_dims, words=("the mean is over",)),
    Operator("norm_other_power", NORM, norms, _power, words=("pow",)),
    Operator("norm_magnitude_not_square", NORM, norms, _magnitude, words=("pow", "abs")),
    Operator("norm_centred", NORM, norms, _centred, words=("sub", "mixes dtypes")),
    Operator("norm_statistics_of_part", NORM, norms, _part_of_row, words=("slice",)),
    Operator("norm_gamma_before_cast", NORM, norms, _gamma_before_cast, legal=True, same=True),
    Operator("norm_gamma_wide_before_cast", NORM, norms, _gamma_wide, legal=True, same=True),
    Operator("norm_one_plus_gamma", NORM, norms, _one_plus_gamma, legal=True),
    Operator("norm_one_plus_gamma_fp32", NORM, norms, _one_plus_gamma_wide, legal=True),
    Operator("norm_without_gamma", NORM, norms, _no_gamma, legal=True, words=GAMMA),
    Operator("norm_gamma_scaled", NORM, norms, _gamma_scaled, legal=True),
    Operator("norm_gamma_constant", NORM, norms, _gamma_constant, words=GAMMA),
    Operator("norm_gamma_one_entry", NORM, norms, _gamma_one_entry, words=GAMMA),
    Operator("norm_gamma_per_row", NORM, norms, _gamma_per_row, words=GAMMA),
    Operator("norm_gamma_leading_dims", NORM, norms, _gamma_leading_dims, legal=True, same=True),
    Operator("norm_gamma_is_argument", NORM, norms, _gamma_argument, legal=True),
    Operator("norm_gamma_negative", NORM, norms, _gamma_negative, legal=True),
    Operator("norm_gamma_fp32", NORM, norms, _fp32_gamma, words=("dtype",)),
    Operator("norm_bias", ("rms_norm", "add_rms_norm"), norms, _bias, words=("rms_norm", "add.Tensor")),
    Operator("norm_gate_after", ("rms_norm", "add_rms_norm"), norms, _gated, words=("rms_norm", "mul")),
    Operator("norm_gate_inside", NORM, norms, _gated_inside, words=("mul",)),
    Operator("norm_statistics_of_first_row", NORM, norms, _rsqrt_of_row, words=("slice",)),
    Operator("norm_statistics_in_16_bits", NORM, norms, _narrow_statistics, words=("fp32", "dtype"), same=True),
    Operator("norm_scales_another_tensor", NORM, norms, _other_source, words=("wide", "mul")),
    Operator("norm_mean_clamped", NORM, norms, _clamped, words=("clamp", *EPS)),
    Operator("norm_rounded_to_fp16", NORM, norms, _half_precision, words=("fp16", "float16"), same=True),
)
