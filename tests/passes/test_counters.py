"""Counters of many layers become one stacked computation with the same results."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes import counters, normalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import built, count, program_of, run, same

LAYERS = 5
COUNTERS = [torch.tensor(10 * i + 1) for i in range(LAYERS)]
STATE = range(LAYERS)


def batched(program, *inputs):
    before = run(program, *inputs)
    verifier = Verifier(program)
    verifier.verify(program)
    changes = counters.run(program)
    verifier.verify(program)
    after = run(program, *inputs)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    return changes


def test_steps_become_one_add():
    program = program_of(lambda *c: (c[0] * 2, *(x + 3 for x in c)), *COUNTERS, mutated=STATE)
    assert batched(program, *COUNTERS) == LAYERS
    assert count(program, aten.add.Tensor) == 1
    assert count(program, aten.split_with_sizes.default) == 1


def test_slots_become_one_table():
    def model(*c):
        starts = torch.arange(0, 32, 16).reshape(2, 1)
        slots = [(starts + (x + torch.arange(4)).reshape(1, 4)).reshape(8) for x in c]
        lengths = [(x.reshape(1) + 4).to(torch.int32).expand(2) for x in c]
        return (*slots, *lengths, *(x + 4 for x in c))

    program = program_of(model, *COUNTERS, mutated=STATE)
    normalise.run(program)
    batched(program, *COUNTERS)
    assert count(program, aten.add.Tensor) == 4
    assert count(program, aten._to_copy.default) == 1
    assert count(program, aten.expand.default) == 1
    assert count(program, aten.split_with_sizes.default) == 3


def test_different_steps_stay_apart():
    program = program_of(lambda *c: tuple(x + (1 + i % 2) for i, x in enumerate(c)), *COUNTERS, mutated=STATE)
    batched(program, *COUNTERS)
    assert count(program, aten.add.Tensor) == 2


def test_a_step_of_one_counter_only_stays():
    program = program_of(lambda *c: (c[1] * 7, *(x + 1 for x in c)), *COUNTERS, mutated=STATE)
    batched(program, *COUNTERS)
    assert count(program, aten.mul.Tensor) == 1
    assert count(program, aten.add.Tensor) == 1


def test_places_of_the_argument_matter():
    program = built(
        lambda c, *x: (c(aten.sub.Tensor, x[0], 1), c(aten.rsub.Scalar, x[1], 1),
                       *(c(aten.sub.Tensor, x[2], n) if n is not x[2] else n for n in x)),
        *COUNTERS[:3], mutated=range(3),
    )
    batched(program, *COUNTERS[:3])


def test_counters_of_two_dtypes_stay_apart():
    inputs = [*COUNTERS, *(c.to(torch.int32) for c in COUNTERS)]
    program = program_of(lambda *c: tuple(x + 1 for x in c), *inputs, mutated=range(2 * LAYERS))
    batched(program, *inputs)
    assert count(program, aten.add.Tensor) == 2


@pytest.mark.parametrize(
    ("inputs", "mutated"),
    [(COUNTERS[:1], [0]), (COUNTERS, []), ([c.float() for c in COUNTERS], STATE),
     ([c.reshape(1) for c in COUNTERS], STATE)],
    ids=["one counter", "not mutated", "floats", "not 0-dim"],
)
def test_leaves_alone(inputs, mutated):
    program = program_of(lambda *c: (*(x + 1 for x in c),), *inputs, mutated=mutated)
    assert batched(program, *inputs) == 0
    assert count(program, aten.add.Tensor) == len(inputs)


def test_wide_results_stay():
    wide = torch.arange(5000)
    program = program_of(lambda *c: (*(wide.numel() + x + torch.arange(5000) for x in c), *c), *COUNTERS, mutated=STATE)
    batched(program, *COUNTERS)
    assert count(program, aten.add.Tensor) == LAYERS + 1
