"""Slices that make up a whole dim become one split."""

from __future__ import annotations

import pytest
import torch

from cannopy.fx_passes import merge_slices, normalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import count, program_of, run, same

X = torch.randn(3, 12)

MERGED = {
    "halves": (lambda x: (x[:, :6] * 2, x[:, 6:]), [[6, 6]], 0),
    "uneven, out of order": (lambda x: (x[:, 7:], x[:, 2:7], x[:, :2]), [[2, 5, 5]], 0),
    "one part twice": (lambda x: (x[:, :4], x[:, 4:], x[:, 4:] + 1), [[4, 8]], 0),
    "a larger slice beside the parts": (lambda x: (x[:, :4], x[:, 4:8], x[:, 8:], x[:, 4:]), [[4, 4, 4]], 1),
    "two dims": (lambda x: (x[:1], x[1:], x[:, :4], x[:, 4:]), [[1, 2], [4, 8]], 0),
}
KEPT = {
    "gap": lambda x: (x[:, :4], x[:, 6:]),
    "overlap": lambda x: (x[:, :7], x[:, 6:]),
    "every second": lambda x: (x[:, ::2], x[:, 1::2]),
    "two tensors": lambda x: (x[:, :6], (x + 1)[:, 6:]),
}


def normalised(model):
    """As the pass finds it: without the slices of a whole dim that some versions of torch trace."""
    program = program_of(model, X)
    normalise.run(program)
    return program


@pytest.mark.parametrize("name", MERGED)
def test_merges(name):
    model, sizes, left = MERGED[name]
    program = normalised(model)
    before = run(program, X)[0]
    verifier = Verifier(program)
    assert merge_slices.run(program) > 0
    verifier.verify(program)
    assert same(run(program, X)[0], before)
    splits = program.gm.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default)
    assert sorted(n.args[1] for n in splits) == sorted(sizes)
    assert count(program, aten.slice.Tensor) == left


@pytest.mark.parametrize("name", KEPT)
def test_leaves_alone(name):
    program = normalised(KEPT[name])
    assert merge_slices.run(program) == 0
    assert count(program, aten.split_with_sizes.default) == 0
