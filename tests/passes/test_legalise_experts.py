"""Grouped products become npu_grouped_matmul, their transposed weights are stored once."""

from __future__ import annotations

import importlib

import pytest
import torch

from cannopy.fx_passes import legalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.program import InputSpec
from tests.passes.graphs import bind, built, count, run, same
from tests.passes.lowering import lower

pytestmark = pytest.mark.usefixtures("npu")

E, T, K, N = 3, 7, 16, 8
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


def by_rows(x, w, ends):
    """Each row by the matrix of its group, in float64."""
    group = [next(e for e, end in enumerate(ends) if row < end) for row in range(len(x))]
    return torch.stack([x[row].double() @ w[g].double() for row, g in enumerate(group)])


def grouped(dtype):
    """What transformers calls for rows of ``dtype``."""
    importlib.import_module("transformers.integrations.moe")
    narrow = dtype == torch.bfloat16
    return aten._grouped_mm.default if narrow else torch.ops.transformers.grouped_mm_fallback.default


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_transposed_parameter_is_stored_transposed(dtype):
    x, w = torch.randn(T, K).to(dtype), torch.randn(E, N, K).to(dtype)
    program = built(
        lambda c, x, w, e: c(grouped(dtype), x, c(aten.permute.default, w, [0, 2, 1]), e), x, w, ENDS,
    )
    spec = program.inputs[1]
    program.inputs[1] = InputSpec(spec.name, "parameter", "self.w", spec.shape, spec.stride, spec.dtype)
    legalise.run(program, {})
    assert [(v.sources, v.recipe) for v in program.weights] == [(("x1",), "w[0].permute([0, 2, 1])")]
    assert count(program, aten.permute.default) == 0
    found, _, summary = lower(program, x, w, ENDS)
    assert same(run(program, x, w, ENDS)[0], found)
    torch.testing.assert_close(found[0].double(), by_rows(x, w.mT, ENDS), rtol=2**-8 if dtype == torch.bfloat16 else
                               1e-5, atol=1e-5)
    assert summary.ge_ops["GroupedMatmul"] == 1
    assert "Transpose" not in summary.kernels
    assert len(bind(program, [x, w, ENDS])[0]) == 4


def test_a_weight_computed_in_every_step_stays():
    x, w = torch.randn(T, K), torch.randn(E, N, K)
    program = built(
        lambda c, x, w, e: c(grouped(x.meta["val"].dtype), x, c(aten.permute.default, w, [0, 2, 1]), e), x, w, ENDS,
    )
    legalise.run(program, {})
    assert program.weights == []
    found = lower(program, x, w, ENDS)[0]
    torch.testing.assert_close(found[0].double(), by_rows(x, w.mT, ENDS), rtol=1e-5, atol=1e-5)


def test_three_dims_are_refused():
    x, w = torch.randn(E, 8, K).bfloat16(), torch.randn(E, K, N).bfloat16()
    program = built(lambda c, x, w: c(aten._grouped_mm.default, x, w), x, w)
    with pytest.raises(legalise.LegaliseError, match="rows"):
        legalise.run(program, {})


def test_counts_of_experts():
    ids = torch.tensor([2, 0, 2, 2, 1])

    def build(c, ids):
        return c(aten.histc.default, c(aten._to_copy.default, ids, dtype=torch.float32), 4, 0, 3)

    program = built(build, ids)
    legalise.run(program, {})
    assert same(lower(program, ids)[0], [torch.tensor([1.0, 1.0, 3.0, 0.0])])
