"""Chains of moves as one strided view: equal to what torch's own views are, whatever the spelling."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.strides import View, view
from tests.passes.graphs import program_of

SIZE = (2, 3, 4, 6)


def _steps() -> st.SearchStrategy[list[tuple[str, int]]]:
    kinds = ["permute", "split", "merge", "slice", "select", "expand"]
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 1000)), max_size=5)


def _apply(x: torch.Tensor, steps: list[tuple[str, int]]) -> torch.Tensor:
    for kind, n in steps:
        rank = x.dim()
        dim = n % rank if rank else 0
        if kind == "permute" and rank:
            x = x.permute([(d + 1 + n % 3) % rank for d in range(rank)])
        elif kind == "split" and rank and x.shape[dim] % 2 == 0 and rank < 6:
            x = x.reshape((*x.shape[:dim], 2, x.shape[dim] // 2, *x.shape[dim + 1 :]))
        elif kind == "merge" and rank > 1:
            at = n % (rank - 1)
            x = x.reshape((*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))
        elif kind == "slice" and rank and x.shape[dim] > 1:
            x = x.narrow(dim, 1, x.shape[dim] - 1)
        elif kind == "select" and rank > 2:
            x = x.select(dim, n % x.shape[dim])
        elif kind == "expand" and rank < 5:
            x = x.unsqueeze(0).expand((3, *x.shape))
    return x


@settings(max_examples=40, deadline=None)
@given(_steps())
def test_the_view_has_the_elements_of_the_value(steps: list[tuple[str, int]]) -> None:
    x = torch.arange(144).view(SIZE)
    program = program_of(lambda t: _apply(t + 0, steps) * 2, x)
    product = next(n for n in reversed(program.gm.graph.nodes) if n.target is aten.mul.Tensor)
    found = view(product.args[0])
    inner = fx_value(program, found, x)
    assert torch.equal(inner.as_strided(found.size, found.stride, found.offset), _apply(x, steps))


def fx_value(program: object, found: View, x: torch.Tensor) -> torch.Tensor:
    """The source of a view, computed by the graph up to there."""
    values: dict[object, torch.Tensor] = {}
    for node in program.gm.graph.nodes:  # type: ignore[attr-defined]
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "call_function":
            args = [values.get(a, a) for a in map(_hashable, node.args)]
            values[node] = node.target(*args, **node.kwargs)
        if node is found.source:
            return values[node].contiguous().flatten()
    raise AssertionError("the source is not in the graph")


def _hashable(argument: object) -> object:
    return tuple(argument) if isinstance(argument, list) else argument


def test_the_same_rearrangement_is_the_same_view() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x + 0
        heads_first = y.view(2, 3, 2, 12).transpose(1, 2)[..., :5]
        cut_first = y.view(6, 2, 12)[..., :5].reshape(2, 3, 2, 5).permute(0, 2, 1, 3)
        other = y.view(2, 2, 3, 12)[..., :5]
        return heads_first * 2, cut_first * 2, other * 2

    program = program_of(both, torch.zeros(2, 3, 24))
    normalise.run(program)
    products = [n.args[0] for n in program.gm.graph.nodes if n.target is aten.mul.Tensor]
    first, second, third = map(view, products)
    assert first == second
    assert first.size == third.size
    assert first != third
