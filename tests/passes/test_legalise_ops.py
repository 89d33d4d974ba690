"""Legal forms give the bits of the operation they replace, also through torchair and the host engine."""

from __future__ import annotations

import operator

import pytest
import torch

from cannopy.fx_passes import legalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.legalise.formulas import FORMULAS
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import built, run, same
from tests.passes.lowering import lower

pytestmark = pytest.mark.usefixtures("npu")

SPECIAL = torch.tensor([[0.0, -0.0, 1.5, -2.5], [float("inf"), float("-inf"), 3.0, 3.0], [-1.0, -7.5, 0.25, 1e-3]])
FINITE = torch.tensor([[0.0, 0.5, 1.5, -2.5], [30.0, -40.0, 3.0, 3.0], [-1.0, -7.5, 0.25, 1e-3]])
WITH_NAN = torch.tensor([[float("nan"), 1.0], [2.0, 2.0]])
INTS = torch.tensor([[3, -4, 0, 7], [2**40, -(2**40), 5, 5], [-1, -1, 6, 2]])
BOOLS = INTS > 2
FLAGS = torch.tensor([[True, True], [False, True], [False, False]])

EXACT = {
    "all.dim": (aten.all.dim, [FLAGS, 1], {}),
    "all.dim keepdim": (aten.all.dim, [FLAGS, 0, True], {}),
    "all.dim of floats": (aten.all.dim, [SPECIAL, -1], {}),
    "all.dims": (aten.all.dims, [FLAGS, [0, 1]], {}),
    "all.dims of everything": (aten.all.dims, [FLAGS], {}),
    "any.dims": (aten.any.dims, [FLAGS, [0]], {}),
    "amax": (aten.amax.default, [SPECIAL, [-1], True], {}),
    "amax of all": (aten.amax.default, [INTS], {}),
    "amax nan": (aten.amax.default, [WITH_NAN, [1]], {}),
    "amin": (aten.amin.default, [SPECIAL, [0]], {}),
    "amin of ints": (aten.amin.default, [torch.tensor([[-(2**63), 2**63 - 1], [4, 5]]), [1]], {}),
    "min": (aten.min.default, [INTS], {}),
    "isnan": (aten.isnan.default, [WITH_NAN], {}),
    "clamp_max": (aten.clamp_max.default, [SPECIAL, 0.5], {}),
    "clamp_max.Tensor": (aten.clamp_max.Tensor, [SPECIAL, SPECIAL[:1] + 1], {}),
    "clamp_min.Tensor": (aten.clamp_min.Tensor, [SPECIAL, SPECIAL[:1] + 1], {}),
    "logical_xor": (aten.logical_xor.default, [BOOLS, INTS], {}),
    "bitwise_xor bool": (aten.bitwise_xor.Tensor, [BOOLS, ~BOOLS], {}),
    "bitwise_xor int": (aten.bitwise_xor.Tensor, [INTS, INTS.flip(0)], {}),
    "shift left": (aten.bitwise_left_shift.Tensor_Scalar, [INTS, 3], {}),
    "shift right": (aten.bitwise_right_shift.Tensor_Scalar, [INTS, 2], {}),
    "index_fill": (aten.index_fill.int_Scalar, [FINITE, 1, torch.tensor([0, 3]), 9.0], {}),
    "index_fill from the end": (aten.index_fill.int_Scalar, [FINITE, -2, torch.tensor([1]), 9.0], {}),
    "trunc": (aten.trunc.default, [SPECIAL], {}),
    "roll": (aten.roll.default, [INTS, [1, -1], [0, 1]], {}),
    "roll flat": (aten.roll.default, [INTS, [5]], {}),
    "eye": (aten.eye.default, [3], {}),
    "eye.m": (aten.eye.m, [2, 3], {"dtype": torch.int64}),
    "index_put": (aten.index_put.default, [FINITE, [torch.tensor([2, 0])], FINITE[:2] + 1], {}),
    "index_put pair": (aten.index_put.default, [FINITE, [torch.tensor([2, 0]), torch.tensor([1, -1])],
                                                torch.tensor([5.0, 6.0])], {}),
    "index_put second dim": (aten.index_put.default, [FINITE, [None, torch.tensor([-1, 0])], FINITE[:, :2] + 1], {}),
    "index_put around a dim": (
        aten.index_put.default,
        [torch.zeros(2, 3, 4), [torch.tensor([1, 0]), None, torch.tensor([3, 2])], torch.arange(6.0).reshape(2, 3)], {},
    ),
    "index_put broadcast indices": (
        aten.index_put.default,
        [torch.zeros(3, 4), [torch.tensor([[0], [2]]), torch.tensor([1, 3])], torch.arange(4.0).reshape(2, 2)], {},
    ),
    "index_put int32 table": (aten.index_put.default, [INTS.int(), [torch.tensor([2, 0])], INTS[:2].int() + 1], {}),
    "index_put mask": (aten.index_put.default, [FINITE, [BOOLS], torch.tensor(9.0)], {}),
    "index_put row mask": (aten.index_put.default, [FINITE, [torch.tensor([True, False, True])], torch.tensor([9.0])],
                           {}),
    "index_put add": (aten.index_put.default, [FINITE, [torch.tensor([1, 1])], FINITE[:2], True], {}),
    "index_copy": (aten.index_copy.default, [FINITE, 1, torch.tensor([3, 0]), FINITE[:, :2] + 1], {}),
    "index_copy int32": (aten.index_copy.default, [INTS.int(), 0, torch.tensor([2]), INTS[:1].int()], {}),
    "histc": (aten.histc.default, [torch.tensor([3.0, 0.0, 3.0, 7.0]), 8, 0, 7], {}),
    "sort.stable": (aten.sort.stable, [torch.tensor([[3, 1, 3, 1]], dtype=torch.int32)], {"stable": True, "dim": -1}),
    "sort.stable down": (aten.sort.stable, [torch.tensor([[3, 1, 3], [1, 1, 2]], dtype=torch.int32)],
                         {"stable": True, "dim": 0, "descending": True}),
    "sort.stable free": (aten.sort.stable, [FINITE], {"stable": False, "dim": 1}),
}
NEAR = {
    "softplus": (aten.softplus.default, [FINITE], {}),
    "softplus beta": (aten.softplus.default, [FINITE, 2.0, 5.0], {}),
    "var": (aten.var.correction, [FINITE, [1]], {}),
    "var correction 0": (aten.var.correction, [FINITE, [0, 1]], {"correction": 0, "keepdim": True}),
    "logaddexp": (aten.logaddexp.default, [FINITE, FINITE.flip(0)], {}),
    "logaddexp infinite": (aten.logaddexp.default, [SPECIAL, SPECIAL], {}),
}


def program_for(target, args, kwargs):
    """The operation on inputs; histc gets its integers through a cast, as models write it."""
    inputs = []

    def feed(value, nodes):
        if isinstance(value, torch.Tensor):
            return nodes[next(i for i, x in enumerate(inputs) if x is value)]
        return [feed(v, nodes) for v in value] if isinstance(value, list) else value

    def collect(value):
        for v in value:
            if isinstance(v, torch.Tensor) and all(v is not x for x in inputs):
                inputs.append(v)
            elif isinstance(v, list):
                collect(v)

    collect(args)

    def build(call, *nodes):
        given = [feed(a, nodes) for a in args]
        if target is aten.histc.default:
            given[0] = call(aten._to_copy.default, call(aten._to_copy.default, given[0], dtype=torch.int64),
                            dtype=torch.float32)
        node = call(target, *given, **kwargs)
        many = isinstance(node.meta["val"], tuple | list)
        return [call(operator.getitem, node, i) for i in range(len(node.meta["val"]))] if many else node

    return built(build, *inputs), inputs


def legal(target, args, kwargs):
    program, inputs = program_for(target, args, kwargs)
    before = run(program, *inputs)[0]
    verifier = Verifier(program)
    assert legalise.run(program, {}) > 0
    verifier.verify(program)
    assert not program.gm.graph.find_nodes(op="call_function", target=target)
    after = run(program, *inputs)[0]
    lowered = lower(program, *inputs)[0]
    return before, after, lowered


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    before, after, lowered = legal(*EXACT[name])
    assert same(after, before)
    assert same(lowered, before)


@pytest.mark.parametrize("name", NEAR)
def test_near(name):
    before, after, lowered = legal(*NEAR[name])
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(lowered, before, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_every_formula_is_tested():
    tested = {case[0] for case in (*EXACT.values(), *NEAR.values())} | {aten.min.dim}
    assert set(FORMULAS) == tested & set(FORMULAS)


def test_min_dim_gives_the_first_of_equal_values():
    x = torch.tensor([[3, 1, 1], [2, 2, 5]])
    program, inputs = program_for(aten.min.dim, [x, 1], {})
    legalise.run(program, {})
    assert same(run(program, *inputs)[0], [torch.tensor([1, 2]), torch.tensor([1, 0])])


@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (16, 0, 16), (7, -2, 3), (5, -1, 0), (3, 0, 1e-3)])
@pytest.mark.parametrize("whole", [False, True])
def test_histc_with_any_bins(bins, low, high, whole):
    def build(call, x):
        if whole:
            x = call(aten._to_copy.default, call(aten._to_copy.default, x, dtype=torch.int64), dtype=torch.float32)
        return call(aten.histc.default, x, bins, low, high)

    x = 4 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    x[0, :8] = torch.tensor([low, high, low - 1e-6, high + 1e-6, 0.0, 1.0, 2.0, 3.0])
    program = built(build, x)
    before = run(program, x)[0]
    assert legalise.run(program, {}) > 0
    Verifier(program).verify(program)
    assert same(run(program, x)[0], before)
    assert same(lower(program, x)[0], before)


@pytest.mark.parametrize("target", [aten.empty.memory_format, aten.empty_strided.default])
def test_empties_are_zeros(target):
    size = [2, 3] if target is aten.empty.memory_format else [[2, 3], [3, 1]]
    args = [size] if target is aten.empty.memory_format else size
    program = built(lambda c, x: c(target, *args, dtype=torch.int64), FINITE)
    legalise.run(program, {})
    assert same(run(program, FINITE)[0], [torch.zeros(2, 3, dtype=torch.int64)])


REFUSED = {
    "histc without bounds": (lambda c, x: c(aten.histc.default, x, 4), [FINITE], "constant bounds"),
    "stable sort of floats": (
        lambda c, x: c(operator.getitem, c(aten.sort.stable, x, stable=True), 0), [FINITE], "32 bits",
    ),
    "mask with many values": (
        lambda c, x, m, v: c(aten.index_put.default, x, [m], v), [FINITE, BOOLS, torch.ones(int(BOOLS.sum()))],
        "torch.where",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    build, inputs, reason = REFUSED[name]
    with pytest.raises(legalise.LegaliseError, match=reason) as e:
        legalise.run(built(build, *inputs), {})
    assert "model.py:" in str(e.value)
