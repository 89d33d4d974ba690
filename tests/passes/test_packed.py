"""A mask of prompts packed one behind the other is proven, and says where the prompts end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.packed import Packed, packed
from tests.passes.graphs import program_of

TOKENS = 9
ENDS = torch.tensor([4, 7])


def _found(fn: Callable[..., torch.Tensor], *more: torch.Tensor) -> Packed | None:
    program = program_of(fn, ENDS, *more)
    normalise.run(program)
    output = next(iter(reversed(program.gm.graph.nodes)))
    return packed(output.args[0][0], TOKENS)


def _mask(request: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (request[:, None] == request[None, :]) & (index[:, None] >= index[None, :])


def _zoo(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    return _mask((index[:, None] >= ends[None, :]).sum(-1), index)[None]


def _other_order(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    request = (ends <= index[:, None]).sum(1)
    return ((index <= index[:, None]) & (request == request[:, None]))[None, None]


def _inclusive(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    return _mask((index[:, None] > ends[None, :]).sum(-1), index)


@pytest.mark.parametrize(("fn", "shift"), [(_zoo, 0), (_other_order, 0), (_inclusive, -1)])
def test_spellings(fn: Callable[..., torch.Tensor], shift: int) -> None:
    found = _found(fn)
    assert found is not None
    assert (found.ends.op, found.shift) == ("placeholder", shift)


def _no_order(ends: torch.Tensor) -> torch.Tensor:
    request = (torch.arange(TOKENS)[:, None] >= ends[None, :]).sum(-1)
    return request[:, None] == request[None, :]


def _strictly_before(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    request = (index[:, None] >= ends[None, :]).sum(-1)
    return (request[:, None] == request[None, :]) & (index[:, None] > index[None, :])


def _counted_backwards(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    return _mask((index[:, None] < ends[None, :] - index[:, None]).sum(-1), index)


def _neighbours(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    request = (index[:, None] >= ends[None, :]).sum(-1)
    return (request[:, None] == request[None, :] + 1) & (index[:, None] >= index[None, :])


def _ids_given(ends: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
    return _mask(request, torch.arange(TOKENS) + 0 * ends[0])


def _summed_elsewhere(ends: torch.Tensor) -> torch.Tensor:
    index = torch.arange(TOKENS)
    both = torch.cat((ends, index[:7]))
    return _mask((index[:, None] >= both[None, :]).sum(0), index)


def _reshaped(ends: torch.Tensor) -> torch.Tensor:
    """Nine masks of three tokens, as one of nine."""
    index = torch.arange(3)
    request = (index[:, None] >= ends[None, :]).sum(-1)
    same, before = request[:, None] == request[None, :], index[:, None] >= index[None, :]
    return (same & before.expand(9, 3, 3)).reshape(TOKENS, TOKENS)


@pytest.mark.parametrize("fn", [_no_order, _strictly_before, _counted_backwards, _neighbours, _summed_elsewhere,
                                _reshaped])
def test_another_mask_is_none(fn: Callable[..., torch.Tensor]) -> None:
    assert _found(fn) is None


def test_request_numbers_that_the_graph_does_not_count_are_none() -> None:
    assert _found(_ids_given, torch.zeros(TOKENS, dtype=torch.long)) is None
