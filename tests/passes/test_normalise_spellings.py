"""Each way to write a thing reaches the one spelling, with the same bits; each look-alike is left alone."""

from __future__ import annotations

import operator

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import aten
from tests.features import needs_shape_function
from tests.passes.graphs import built, count, program_of, run, same, targets

F32 = torch.randn(4, 6)
BF16 = F32.to(torch.bfloat16)
INTS = torch.arange(24).reshape(4, 6)
POSITION = torch.tensor(5)


def normalised(program, *inputs):
    before = run(program, *inputs)
    normalise.run(program)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    return program


REACHES = {
    "square": (lambda c, x: c(aten.square.default, x), [F32], ["aten.pow.Tensor_Scalar"]),
    "bf16 x * x": (lambda c, x: c(aten.mul.Tensor, x, x), [BF16], ["aten.pow.Tensor_Scalar"]),
    "x ** -0.5": (lambda c, x: c(aten.pow.Tensor_Scalar, x, -0.5), [BF16.abs()], ["aten.rsqrt"]),
    "mean, then its dim": (
        lambda c, x: c(aten.unsqueeze.default, c(aten.mean.dim, x, [-1]), -1), [F32], ["aten.mean.dim"],
    ),
    "bf16 sum, then its dim": (
        lambda c, x: c(aten.view.default, c(aten.sum.dim_IntList, x, [1], False), [4, 1]), [BF16],
        ["aten.sum.dim_IntList"],
    ),
    "mean, a function, then its dim": (
        lambda c, x: c(aten.unsqueeze.default, c(aten.rsqrt.default, c(aten.add.Tensor, c(aten.mean.dim, x, [-1]), 4.0,
                                                                       alpha=2)), 1),
        [F32], ["aten.mean.dim", "aten.add.Tensor", "aten.rsqrt"],
    ),
    "twice a sum, then its dim": (
        lambda c, x: c(aten.unsqueeze.default, (lambda t: c(aten.add.Tensor, t, t))(c(aten.sum.dim_IntList, x, [-1])),
                       1),
        [F32[:, :4]], ["aten.sum.dim_IntList", "aten.add.Tensor", "aten.reshape"],
    ),
    "mean, then another dim": (
        lambda c, x: c(aten.unsqueeze.default, c(aten.mean.dim, x, [-1]), 0), [F32], ["aten.mean.dim", "aten.reshape"],
    ),
    "cast through wider": (
        lambda c, x: c(aten._to_copy.default, c(aten._to_copy.default, x, dtype=torch.float32), dtype=torch.float16),
        [BF16], ["aten._to_copy"],
    ),
    "cast to wider and back": (
        lambda c, x: c(aten._to_copy.default, c(aten._to_copy.default, x, dtype=torch.float32), dtype=torch.bfloat16),
        [BF16], [],
    ),
    "add.Scalar": (lambda c, x: c(aten.add.Scalar, x, 2, 3), [F32], ["aten.add.Tensor"]),
    "arange(1) + x": (lambda c, x: c(aten.add.Tensor, c(aten.arange.default, 1), x), [POSITION], ["aten.reshape"]),
    "x + arange(0, 1)": (lambda c, x: c(aten.add.Tensor, x, c(aten.arange.start, 0, 1)), [POSITION], ["aten.reshape"]),
    "arange(1) + [3]": (lambda c, x: c(aten.add.Tensor, c(aten.arange.default, 1), x), [torch.arange(3)], []),
    "scalar_tensor": (lambda c, x: c(aten.add.Tensor, x, c(aten.scalar_tensor.default, 2.0)), [F32],
                      ["aten.add.Tensor"]),
    "scalar_tensor first": (lambda c, x: c(aten.mul.Tensor, c(aten.full.default, [], 3.0), x), [F32],
                            ["aten.mul.Tensor"]),
    "x / full": (lambda c, x: c(aten.div.Tensor, x, c(aten.full.default, [1], 3.0)), [F32], ["aten.div.Tensor"]),
    "x + -0.0": (lambda c, x: c(aten.add.Tensor, x, -0.0), [F32], []),
    "x - 0.0": (lambda c, x: c(aten.sub.Tensor, x, 0.0), [F32], []),
    "x + 0.0": (lambda c, x: c(aten.add.Tensor, x, 0.0), [F32], ["aten.add.Tensor"]),
    "copy": (lambda c, x, y: c(aten.copy.default, x, y), [BF16, F32[0]], ["aten._to_copy", "aten.expand"]),
    "copy same": (lambda c, x, y: c(aten.copy.default, x, y), [F32, F32 + 1], []),
    "cat of one": (lambda c, x: c(aten.cat.default, [x], 1), [F32], []),
    "dropout p 0": (lambda c, x: c(aten.dropout.default, x, 0.0, True), [F32], []),
    "dropout in eval": (lambda c, x: c(aten.dropout.default, x, 0.5, False), [F32], []),
    "native_dropout in eval": (
        lambda c, x: c(operator.getitem, c(aten.native_dropout.default, x, 0.5, False), 0), [F32], [],
    ),
    "expand -1": (lambda c, x: c(aten.expand.default, x, [-1, -1]), [F32], []),
    "0-dim transpose": (lambda c, x: c(aten.transpose.int, x, 0, -1), [POSITION], []),
    "the only row": (lambda c, x: c(aten.select.int, x, -2, 0), [F32[:1]], ["aten.reshape"]),
    "one of four rows": (lambda c, x: c(aten.select.int, x, 0, 0), [F32], ["aten.select.int"]),
    "select_scatter": (lambda c, x, y: c(aten.select_scatter.default, x, y, 1, -1), [F32, F32[:, 0].clone()],
                       ["aten.reshape", "aten.slice_scatter"]),
    "scatter of everything": (lambda c, x, y: c(aten.slice_scatter.default, x, y, 0, 0, 4), [F32, F32 + 1], []),
    "read of what was written": (
        lambda c, x, y: c(aten.slice.Tensor, c(aten.slice_scatter.default, x, y, 1, 1, 4), 1, 2, 4),
        [F32, F32[:, 1:4] + 1], ["aten.slice.Tensor"],
    ),
    "read beside it": (
        lambda c, x, y: c(aten.slice.Tensor, c(aten.slice_scatter.default, x, y, 1, 1, 4), 1, 4, 6),
        [F32, F32[:, 1:4] + 1], ["aten.slice.Tensor"],
    ),
    "addmm of a transposed weight": (
        lambda c, b, x, w: c(aten.addmm.default, b, x, c(aten.t.default, w)),
        [torch.randn(3), F32, torch.randn(3, 6)], ["aten.linear"],
    ),
}


@pytest.mark.parametrize("name", REACHES)
def test_reaches(name):
    build, inputs, wanted = REACHES[name]
    if name == "add.Scalar":
        needs_shape_function(aten.add.Scalar, F32, 2, 3)
    program = normalised(built(build, *inputs), *inputs)
    assert targets(program) == wanted


def test_inverse_root_is_within_two_units_in_the_last_place():
    x = F32.abs()
    program = built(lambda c, x: c(aten.reciprocal.default, c(aten.sqrt.default, x)), x)
    before = run(program, x)[0][0]
    normalise.run(program)
    after = run(program, x)[0][0]
    assert targets(program) == ["aten.rsqrt"]
    assert (before.view(torch.int32) - after.view(torch.int32)).abs().max() <= 2


CONSTANTS = {
    "zeros": lambda x: torch.zeros(4, 6),
    "ones": lambda x: torch.ones(4, 6, dtype=torch.int32),
    "zeros_like": torch.zeros_like,
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.bool),
    "new_ones": lambda x: x.new_ones((4, 6)),
    "new_zeros": lambda x: x.new_zeros((2,)),
    "new_full": lambda x: x.new_full((2,), 3.5),
    "full_like": lambda x: torch.full_like(x, 2, dtype=torch.int64),
    "full": lambda x: torch.full((3,), True),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_full(name):
    program = normalised(program_of(lambda x: (CONSTANTS[name](x), x + 1), F32), F32)
    assert targets(program) == ["aten.full", "aten.add.Tensor"]


LEFT_ALONE = {
    "int ** 2.0 is float": (lambda c, x: c(aten.pow.Tensor_Scalar, x, 2.0), [INTS]),
    "1 / sqrt rounds twice in bf16": (lambda c, x: c(aten.reciprocal.default, c(aten.sqrt.default, x)), [BF16.abs()]),
    "-0.0 + 0": (lambda c, x: c(aten.add.Tensor, x, 0), [torch.tensor([-0.0, 1.0])]),
    "alpha": (lambda c, x, y: c(aten.add.Tensor, x, y, alpha=2), [F32, F32 + 1]),
    "int / 1 is float": (lambda c, x: c(aten.div.Tensor, x, 1), [INTS]),
    "int * 1.0 is float": (lambda c, x: c(aten.mul.Tensor, x, 1.0), [INTS]),
    "div with rounding": (lambda c, x: c(aten.div.Tensor_mode, x, 1, rounding_mode="floor"), [F32]),
    "narrowing cast": (
        lambda c, x: c(aten._to_copy.default, c(aten._to_copy.default, x, dtype=torch.bfloat16), dtype=torch.float32),
        [F32],
    ),
    "int64 through int32": (
        lambda c, x: c(aten._to_copy.default, c(aten._to_copy.default, x, dtype=torch.int32), dtype=torch.int64),
        [torch.tensor([2**40 + 1])],
    ),
    "float through int": (
        lambda c, x: c(aten._to_copy.default, c(aten._to_copy.default, x, dtype=torch.int64), dtype=torch.float32),
        [F32 * 9],
    ),
    "arange(1) scaled": (lambda c, x: c(aten.add.Tensor, c(aten.arange.default, 1), x, alpha=3), [POSITION]),
    "arange(1, 2)": (lambda c, x: c(aten.add.Tensor, c(aten.arange.start, 1, 2), x), [POSITION]),
    "float arange(1)": (
        lambda c, x: c(aten.add.Tensor, c(aten.arange.default, 1, dtype=torch.float32), x), [torch.tensor(-0.0)],
    ),
    "overlapping slice_scatter": (
        lambda c, x, y: c(aten.slice_scatter.default, c(aten.slice_scatter.default, x, y, 0, 0, 3), y, 0, 1, 4),
        [F32, F32[:3] + 1],
    ),
    "slice_scatter with a gap": (
        lambda c, x, y: c(aten.slice_scatter.default, c(aten.slice_scatter.default, x, y, 0, 0, 1), y, 0, 2, 3),
        [F32, F32[:1] + 1],
    ),
    "slice across the edge of what was written": (
        lambda c, x, y: c(aten.slice.Tensor, c(aten.slice_scatter.default, x, y, 1, 1, 4), 1, 3, 6, 1),
        [F32, F32[:, 1:4] + 1],
    ),
    "addmm with beta": (
        lambda c, b, x, w: c(aten.addmm.default, b, x, c(aten.permute.default, w, [1, 0]), beta=2),
        [torch.randn(3), F32, torch.randn(3, 6)],
    ),
    "addmm of a matrix": (
        lambda c, b, x, w: c(aten.addmm.default, b, x, c(aten.permute.default, w, [1, 0])),
        [torch.randn(4, 3), F32, torch.randn(3, 6)],
    ),
    "dropout in training": (lambda c, x: c(aten.dropout.default, x, 1.0, True), [F32]),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_leaves_alone(name):
    build, inputs = LEFT_ALONE[name]
    program = built(build, *inputs)
    before = targets(program)
    assert targets(normalised(program, *inputs)) == before


def test_expanded_matrix_dims_stay_expanded():
    a, b = torch.randn(2, 1, 5), torch.randn(2, 5, 3)
    program = built(
        lambda c, x, y: c(aten.bmm.default, c(aten.expand.default, x, [2, 4, 5]), y), a, b,
    )
    normalised(program, a, b)
    assert count(program, aten.expand.default) == 1


def test_clone_of_an_old_value_that_outlives_the_graph_stays():
    x = torch.randn(3)
    program = built(lambda c, x: (c(aten.clone.default, x), c(aten.add.Tensor, x, 1)), x, mutated=[0])
    outputs, inputs = run(normalised(program, x), x)
    assert same(outputs, [x])
    assert same(inputs, [x + 1])
    assert count(program, aten.clone.default) == 1


def test_index_of_topk_is_not_cast():
    x = torch.randn(4, 9)
    program = program_of(lambda x: torch.zeros_like(x).scatter(1, x.topk(3).indices.int().long(), 1.0), x)
    normalised(program, x)
    assert count(program, aten._to_copy.default) == 0


def test_no_fixed_point_is_an_error(monkeypatch):
    restless = normalise.Step("restless", None, lambda program, editor, node: 1)
    monkeypatch.setattr(normalise, "PIPELINE", (restless,))
    with pytest.raises(normalise.NoFixedPointError, match=r"restless \(1\)"):
        normalise.run(built(lambda c, x: c(aten.neg.default, x), F32))
