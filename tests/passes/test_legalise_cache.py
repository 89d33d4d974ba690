"""Cache writes update the caller's tensor in place, without a copy in the GE graph."""

from __future__ import annotations

import operator

import pytest
import torch

from cannopy.fx_passes import counters, legalise, merge_slices, normalise, rebind
from cannopy.fx_passes.graph import Editor, aten
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import built, count, program_of, run, same
from tests.passes.lowering import lower

pytestmark = pytest.mark.usefixtures("npu")

B, H, L, D = 2, 3, 16, 4
CACHE = torch.randn(B, H, L, D)
INDEX = torch.tensor([5, 2])
ROWS = torch.randn(B, H, 2, D)


def scatters(program):
    return count(program, torch.ops.npu.npu_scatter_nd_update.default)


def checked(program, *inputs):
    """Legal form, eager and lowered, against the program as it was; the summary of the GE graph."""
    before = run(program, *inputs)
    verifier = Verifier(program)
    legalise.run(program, {})
    verifier.verify(program)
    for outputs, state in (run(program, *inputs), (lowered := lower(program, *inputs))[:2]):
        assert same(outputs, before[0])
        assert same(state, before[1])
    return lowered[2]


def write(cache, index, value):
    new = torch.index_copy(cache, -2, index, value)
    return new.sum(-1), new


def test_rows_of_every_batch_and_head():
    program = program_of(write, CACHE, INDEX, ROWS, mutated=[0])
    summary = checked(program, CACHE, INDEX, ROWS)
    assert program.inputs[0].view == (B * H * L, D)
    assert scatters(program) == 1
    assert summary.cache_copies == 0
    assert "TensorMove" not in summary.ge_ops


def test_one_batch_needs_no_slot_arithmetic():
    inputs = CACHE[:1, 0], INDEX, ROWS[:1, 0]
    program = program_of(write, *inputs, mutated=[0])
    checked(program, *inputs)
    assert count(program, aten.add.Tensor, aten.arange.start_step) == 0


def test_a_reader_of_the_old_value_costs_the_copy():
    program = program_of(lambda c, i, v: (c.sum(0), *write(c, i, v)), CACHE, INDEX, ROWS, mutated=[0])
    summary = checked(program, CACHE, INDEX, ROWS)
    assert summary.ge_ops["TensorMove"] == 1


def test_a_block_view_is_kept():
    program = program_of(write, CACHE, INDEX, ROWS, mutated=[0])
    cache = next(iter(program.gm.graph.nodes))
    rebind.rebind(program, Editor(program.gm), cache, [B * H * L // 8, 8, 1, D])
    summary = checked(program, CACHE, INDEX, ROWS)
    assert program.inputs[0].view == (B * H * L // 8, 8, 1, D)
    assert summary.cache_copies == 0
    assert "TensorMove" not in summary.ge_ops


def test_positions_per_request():
    positions, value = torch.tensor([3, -1]), torch.randn(B, H, D)

    def model(cache, rows, at, value):
        new = torch.ops.aten.index_put(cache, [rows, at], value)
        return new.sum(), new

    inputs = CACHE.transpose(1, 2).contiguous(), torch.arange(B), positions, value
    program = program_of(model, *inputs, mutated=[0])
    summary = checked(program, *inputs)
    assert scatters(program) == 1
    assert "TensorMove" not in summary.ge_ops


def test_a_cache_that_is_not_contiguous_is_written_all_the_same():
    cache = torch.randn(B, L, H, D).transpose(1, 2)
    program = program_of(write, cache, INDEX, ROWS, mutated=[0])
    checked(program, cache, INDEX, ROWS)
    assert program.inputs[0].view is None


def test_two_writes_of_one_cache():
    def model(cache, index, value):
        first = torch.index_copy(cache, 2, index, value)
        second = torch.index_copy(first, 2, index + 1, value * 2)
        return second.sum(-1), second

    program = program_of(model, CACHE, INDEX, ROWS, mutated=[0])
    checked(program, CACHE, INDEX, ROWS)
    assert scatters(program) == 2


def test_a_dtype_that_the_scatter_lacks():
    inputs = (CACHE * 9).to(torch.int32), INDEX, (ROWS * 9).to(torch.int32)
    program = program_of(lambda c, i, v: (c[:1] * 0, torch.index_copy(c, 2, i, v)), *inputs, mutated=[0])
    checked(program, *inputs)
    assert scatters(program) == 0


def test_counters_and_slots_cost_the_same_for_any_number_of_layers():
    def kernels(layers):
        def model(index, value, *state):
            places, caches = state[:layers], state[layers:]
            new = [torch.index_copy(c, 1, p + index, value) for c, p in zip(caches, places, strict=True)]
            return (*(n.sum() for n in new), *(p + 2 for p in places), *new)

        state = [torch.tensor(i) for i in range(layers)] + [torch.randn(B, L, D) for _ in range(layers)]
        inputs = torch.arange(2), torch.randn(B, 2, D), *state
        program = program_of(model, *inputs, mutated=range(2, 2 + 2 * layers))
        before = run(program, *inputs)
        legalise.run(program, {})
        counters.run(program)
        outputs, after, summary = lower(program, *inputs)
        assert same(outputs, before[0])
        assert same(after, before[1])
        per_layer = ("ScatterNdUpdate", "ReduceSum")
        assert all(summary.kernels[k] == layers for k in per_layer)
        return {k: n for k, n in summary.kernels.items() if k not in per_layer}

    few, many = kernels(3), kernels(7)
    assert few == many
    assert few["SplitV"] == 2
    assert few["Add"] == 3


def test_merged_slices_are_one_kernel():
    x = torch.randn(4, 12)
    program = program_of(lambda x: (x[:, :3] * 2, x[:, 3:8] * 2, x[:, 8:] * 2), x)
    before = run(program, x)[0]
    normalise.run(program)
    merge_slices.run(program)
    outputs, _, summary = lower(program, x)
    assert same(outputs, before)
    assert summary.kernels["SplitV"] == 1
    assert not any(k.startswith("StridedSlice") for k in summary.kernels)


def test_inverse_permutation_of_a_sort():
    ids = torch.tensor([3, 1, 2, 0, 1])

    def build(c, ids, rows):
        order = c(torch.ops.aten.sort.default, ids)
        place = c(operator.getitem, order, 1)
        empty = c(aten.empty_like.default, place)
        inverse = c(aten.index_put.default, empty, [place], c(aten.arange.default, 5))
        return c(aten.index.Tensor, c(aten.index.Tensor, rows, [place]), [inverse])

    rows = torch.randn(5, 3)
    checked(built(build, ids, rows), ids, rows)
