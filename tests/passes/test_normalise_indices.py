"""What the bounds of indices decide, and what they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.verifier import Verifier
from tests.passes.graphs import Tensor, count, program_of, run, same

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([3, 0, 2, 2, 1, 4, 0, 3, 1, 1])


def _picks(x: Tensor) -> Tensor:
    return x.topk(2, -1)[1].reshape(-1)


def _repeated(x: Tensor) -> Tensor:
    rows = torch.arange(5)[:, None].expand(5, 2).reshape(-1)
    return x[rows][torch.argsort(_picks(x), stable=True)]


def _masked(bound: int) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        ids = _picks(x).sort()[0]
        return x.repeat(2, 1).masked_fill((ids >= bound)[:, None], 0.0)

    return fn


DECIDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[object, ...], int]] = {
    "bound out of reach": (_masked(6), (aten.masked_fill.Scalar, aten.ge.Scalar), 0),
    "bound in reach": (_masked(5), (aten.masked_fill.Scalar,), 1),
    "clamp that changes nothing": (lambda x: x[0][_picks(x).clamp(0, 5)], (aten.clamp.default,), 0),
    "clamp that does": (lambda x: x[0][_picks(x).clamp(1, 5)], (aten.clamp.default,), 1),
    "sorted by its own order": (lambda x: _picks(x)[_picks(x).sort(stable=True)[1]], (aten.index.Tensor,), 0),
    "rows of repeated rows": (_repeated, (aten.index.Tensor,), 1),
    "rows of rows": (lambda x: x[_picks(x).clamp(0, 4)][_picks(x)], (aten.index.Tensor,), 2),
}


@pytest.mark.parametrize("name", DECIDED)
def test_bounds(name: str) -> None:
    fn, targets, left = DECIDED[name]
    program = program_of(fn, X)
    before = run(program, X)[0]
    verifier = Verifier(program)
    normalise.run(program)
    verifier.verify(program)
    assert count(program, *targets) == left
    assert same(run(program, X)[0], before)


@pytest.mark.parametrize("fn", [
    lambda x, i: x.masked_fill((i[:5] >= 5)[:, None], 0.0),
    lambda x, i: x[i.clamp(0, 4)],
    lambda x, i: x[(i - 4)[_picks(x)]],
], ids=["compared", "clamped", "negative"])
def test_indices_that_come_from_outside_are_not_bounded(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = program_of(fn, X, IDS)
    before = run(program, X, IDS)[0]
    normalise.run(program)
    assert same(run(program, X, IDS)[0], before)
    assert count(program, aten.masked_fill.Scalar, aten.clamp.default, aten.sub.Tensor) == 1
