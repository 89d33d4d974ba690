"""Old values of mutated inputs that a result or another input keeps are copied before the input is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from cannopy.fx_passes import normalise
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import program_of, run, same

Tensor = torch.Tensor
X, Y = torch.arange(8.0).view(2, 4), torch.ones(2, 4)
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "times one": lambda x: x * 1,
    "divided by one": lambda x: x / 1.0,
    "minus zero": lambda x: x - 0.0,
    "alone in a cat": lambda x: torch.cat([x]),
    "a mask that hides nothing": lambda x: x.masked_fill((torch.arange(4) >= 9)[None], 0.0),
    "a view of it": lambda x: (x * 1)[:, :2],
    "copied into new memory": lambda x: torch.empty_like(x).copy_(x),
    "no dropout": lambda x: F.dropout(x.clone(), 0.0, True),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_keeps_the_old_value(name: str) -> None:
    program = program_of(lambda x, y: (RESULTS[name](x), x + y), X, Y, mutated=[0])
    before = run(program, X, Y)
    normalise.run(program)
    Verifier(program).verify(program)
    after = run(program, X, Y)
    assert all(same(a, b) for a, b in zip(after, before, strict=True))
    assert normalise.run(program) == 0


@pytest.mark.parametrize("held", [lambda x: x.clone(), lambda x: x * 1], ids=["clone", "times one"])
def test_two_inputs_change_places(held: Callable[[Tensor], Tensor]) -> None:
    program = program_of(lambda x, y: (x + y, torch.empty_like(x).copy_(y), torch.empty_like(y).copy_(held(x))), X, Y,
                         mutated=[0, 1])
    normalise.run(program)
    Verifier(program).verify(program)
    _, (x, y) = run(program, X, Y)
    assert torch.equal(x, Y)
    assert torch.equal(y, X)


def test_nothing_is_copied_where_nothing_is_kept() -> None:
    program = program_of(lambda x, y: ((x * 1) @ y.T, x + y), X, Y, mutated=[0])
    normalise.run(program)
    assert not program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
