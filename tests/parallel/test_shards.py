"""Parts of weights equal the parts of the whole, and are read from parts of the parameters where that is possible."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cannopy.fusion_rules.parallel.shards import Part, Piece, take
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.weight_plan import derived
from tests.rules.moe_support import Tensor, Traced, trace

SHAPE = (6, 4, 8)


def program(count: int) -> Traced:
    """A program that reads ``count`` parameters of `SHAPE` with distinct entries."""
    numbers = torch.arange(count * 6 * 4 * 8, dtype=torch.float32).reshape(count, *SHAPE)
    return trace(lambda x, *w: sum(w, x), torch.zeros(SHAPE), *numbers, parameters=range(1, count + 1))


def built(traced: Traced, name: str) -> Tensor:
    """The weight ``name`` of the plan from the parameters."""
    values = dict(traced.values)
    for entry in traced.program.weights:
        values[entry.name] = entry.build([values[s] for s in entry.sources])
    return values[name]


CASES: list[tuple[str, int, int, Sequence[Piece], set[str]]] = [
    ("w[0]", 1, 0, [(2, 4)], {"w[0][2:4]"}),
    ("w[0]", 1, -1, [(4, 8)], {"w[0][:, :, 4:8]"}),
    ("w[0].transpose(1, 2)", 1, 1, [(4, 8)], {"w[0][:, :, 4:8]"}),
    ("w[0].transpose(1, 2)", 1, 0, [(0, 3)], {"w[0][0:3]"}),
    ("torch.cat((w[0], w[1]))", 2, 0, [(1, 2), (7, 8)], {"w[0][1:2]"}),
    ("torch.cat((w[0], w[1]))", 2, 0, [(6, 9)], {"w[0][0:3]"}),
    ("torch.cat((w[0], w[1]))", 2, 1, [(0, 2)], {"w[0][:, 0:2]"}),
    ("torch.stack([w[i + 0] for i in range(0, 4, 1)], 0)", 4, 0, [(1, 3)], set()),
    ("torch.stack((w[0], w[1]), 1)", 2, 2, [(1, 2)], {"w[0][:, 1:2]"}),
    ("w[0].reshape(3, 2, 32)[:, 1:]", 1, 0, [(1, 2)], {"w[0][2:4]"}),
    ("w[0].reshape(3, 2, 32)[:, 1:].transpose(1, 2)", 1, 0, [(0, 2)], {"w[0][0:4]"}),
    ("w[0].reshape(2, 3, 32)[:, :2]", 1, 0, [(1, 2)], {"w[0][3:6]"}),
    ("w[0].reshape(3, 64)[:, 3:]", 1, 0, [(1, 2)], {"w[0][2:4]"}),
    ("w[0].reshape(3, 2, 32)[1:]", 1, 0, [(1, 2)], {"(w[0].reshape(3, 2, 32)[1:])[1:2]"}),
    ("w[0].reshape(3, 2, 32)[:, 1:]", 1, 1, [(0, 1)], set()),
    ("w[0].reshape(6, 2, 16).transpose(0, 1)", 1, 1, [(2, 4)], {"w[0][2:4]"}),
    ("w[0] * 2", 1, 0, [(1, 2)], {"(w[0] * 2)[1:2]"}),
    ("w[0]", 1, 0, [(0, 2), (4, 6)], {"w[0][0:2]", "w[0][4:6]"}),
]


@pytest.mark.parametrize(("recipe", "count", "dim", "pieces", "slices"), CASES, ids=[f"{c[0]} {c[2]}" for c in CASES])
def test_parts(recipe: str, count: int, dim: int, pieces: list[Piece], slices: set[str]) -> None:
    traced = program(count)
    editor = Editor(traced.program.gm)
    sources = [editor.input(spec.name) for spec in traced.program.inputs[1:]]
    weight = sources[0] if recipe == "w[0]" else derived(traced.program, editor, "whole", sources, recipe)
    part = take(traced.program, editor, weight, dim, pieces)
    whole = built(traced, weight.name)
    wanted = torch.cat([whole.narrow(dim, a, b - a) for a, b in pieces], dim)
    torch.testing.assert_close(built(traced, part.name), wanted, rtol=0, atol=0)
    assert tuple(part.meta["val"].shape) == tuple(wanted.shape)
    parameters = {source.name for source in sources}
    assert {e.recipe for e in traced.program.weights if set(e.sources) <= parameters and e.name != "whole"} >= slices


def test_all_of_a_weight_is_the_weight() -> None:
    traced = program(1)
    editor = Editor(traced.program.gm)
    weight = editor.input(traced.program.inputs[1].name)
    assert take(traced.program, editor, weight, 1, [(0, 2), (2, 4)]) is weight


def test_a_size_that_cannot_be_divided() -> None:
    assert Part(1, 4).of(12, "experts") == (3, 6)
    with pytest.raises(ParallelError, match="10 heads cannot be divided: 10 / 4 is no whole number"):
        Part(1, 4).of(10, "10 heads")
