"""Masks are taken for causal only when the graph proves it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cannopy.fx_passes import normalise
from cannopy.fx_passes.affine import Causal, causal
from tests.passes.graphs import program_of

PAST = torch.tensor(5)
QUERIES, KEYS = 3, 12


def _mask(
    fn: Callable[..., torch.Tensor], *inputs: torch.Tensor, queries: int = QUERIES, keys: int = KEYS
) -> Causal | str:
    program = program_of(fn, *inputs)
    normalise.run(program)
    output = next(iter(reversed(program.gm.graph.nodes)))
    return causal(output.args[0][0], queries, keys)


def _positions(past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.arange(QUERIES) + past)[:, None], torch.arange(KEYS)[None, :]


def _le(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return k <= q


def _ge(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return (q >= k).expand(2, 1, QUERIES, KEYS)


def _lt(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return k < q + 1


def _not_gt(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return ~(k > q)


def _with_true(past: torch.Tensor) -> torch.Tensor:
    return _le(past) & torch.ones(QUERIES, KEYS, dtype=torch.bool) & (torch.arange(KEYS) >= 0)


def _additive(past: torch.Tensor) -> torch.Tensor:
    return torch.where(_le(past), torch.zeros(()), torch.full((), torch.finfo(torch.float32).min))


def _selected_row(past: torch.Tensor) -> torch.Tensor:
    return _le(past)[None, None].expand(2, 1, QUERIES, KEYS)[:, 0]


@pytest.mark.parametrize("fn", [_le, _ge, _lt, _not_gt, _with_true, _additive, _selected_row])
def test_every_spelling_of_the_causal_mask_is_proven(fn: Callable[..., torch.Tensor]) -> None:
    found = _mask(fn, PAST)
    assert isinstance(found, Causal), found
    assert found.const == 0
    assert found.symbol is not None
    assert found.symbol.op == "placeholder"


def test_a_static_prefill_mask_has_no_symbol() -> None:
    found = _mask(lambda x: torch.arange(KEYS)[None, :] <= torch.arange(QUERIES)[:, None] + 2, torch.tensor(0))
    assert found == Causal(None, 2)


INF = float("-inf")
TRIANGLES: dict[str, Callable[[], torch.Tensor]] = {
    "lower": lambda: torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(2),
    "not upper": lambda: ~torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(3),
    "ones": lambda: torch.tril(torch.ones(1, 1, QUERIES, KEYS), 2) != 0,
    "upper ones are 0": lambda: torch.triu(torch.ones(QUERIES, KEYS), 3) == 0,
    "cast": lambda: torch.tril(torch.ones(QUERIES, KEYS), 2).bool(),
    "numbers": lambda: torch.tril(torch.ones(QUERIES, KEYS, dtype=torch.int64), 2).bool(),
    "added": lambda: torch.triu(torch.full((QUERIES, KEYS), INF), 3).bfloat16(),
    "added, filled": lambda: torch.zeros(QUERIES, KEYS).masked_fill(torch.ones(QUERIES, KEYS).triu(3).bool(), INF),
}


@pytest.mark.parametrize("name", TRIANGLES)
def test_a_triangle_is_causal(name: str) -> None:
    assert _mask(lambda past: TRIANGLES[name](), torch.tensor(0)) == Causal(None, 2)


@pytest.mark.parametrize("fn", [
    lambda: torch.tril(torch.ones(QUERIES, KEYS), 2) == 0,
    lambda: torch.triu(torch.ones(QUERIES, KEYS), 3).bool(),
    lambda: torch.tril(torch.full((QUERIES, KEYS), INF), 2),
    lambda: torch.triu(torch.full((QUERIES, KEYS), -100.0), 3),
    lambda: torch.tril(torch.zeros(QUERIES, KEYS), 2) != 0,
    lambda: torch.tril(torch.full((QUERIES, KEYS), 0.5), 2).long().bool(),
    lambda: torch.full((QUERIES, KEYS), INF).masked_fill(torch.ones(QUERIES, KEYS).tril(2).bool(), -INF),
], ids=range(7))
def test_other_triangles_are_refused(fn: Callable[[], torch.Tensor]) -> None:
    assert isinstance(_mask(lambda past: fn(), torch.tensor(0)), str)


def _strict(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return k < q


def _window(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return (k <= q) & (k > q - 4)


def _anti(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return k >= q


def _strided(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return 2 * k <= q


def _transposed(past: torch.Tensor) -> torch.Tensor:
    return _le(past).t().contiguous()[:QUERIES, :QUERIES]


def _weak_fill(past: torch.Tensor) -> torch.Tensor:
    return torch.where(_le(past), torch.zeros(()), torch.full((), -100.0))


def _block(past: torch.Tensor) -> torch.Tensor:
    q, k = _positions(past)
    return k // 4 <= q // 4


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(_window, "sliding window"), (_anti, "key <= query"), (_strided, "not provably"), (_transposed, "key <= query"),
     (_weak_fill, "not provably"), (_block, "not provably")],
)
def test_other_masks_are_refused(fn: Callable[..., torch.Tensor], reason: str) -> None:
    found = _mask(fn, PAST, keys=QUERIES if fn is _transposed else KEYS)
    assert isinstance(found, str)
    assert reason in found


def test_a_strict_mask_sees_one_key_less() -> None:
    found = _mask(_strict, PAST)
    assert isinstance(found, Causal)
    assert found.const == -1


def test_one_row_for_all_queries_is_refused() -> None:
    found = _mask(lambda past: (torch.arange(KEYS) <= past)[None], PAST)
    assert isinstance(found, str)
    assert "3 queries" in found
    assert isinstance(_mask(lambda past: (torch.arange(KEYS) <= past)[None], PAST, queries=1), Causal)


def test_a_padding_mask_is_refused() -> None:
    padding = torch.ones(2, KEYS, dtype=torch.bool)
    found = _mask(lambda p, m: _le(p) & m[:, None, :], PAST, padding)
    assert isinstance(found, str)
    assert "padding" in found


@pytest.mark.parametrize("one", [lambda: torch.arange(1), lambda: torch.arange(5)[2:3], lambda: torch.arange(3, 4)],
                         ids=["arange", "slice", "arange from"])
def test_one_index_is_broadcast(one: Callable[[], torch.Tensor]) -> None:
    """It is one number for every key: the mask shows the keys up to it alone."""
    found = _mask(lambda past: ((one() >= torch.arange(KEYS)) & (torch.arange(KEYS) <= past))[None], PAST, queries=1)
    assert isinstance(found, str)
    assert "2 conditions" in found


def test_lengths_per_request_are_proven() -> None:
    found = _mask(lambda past: torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + past[:, None, None] - 1,
                  torch.tensor([3, 5]))
    assert isinstance(found, Causal), found
    assert (found.by_request, found.const) == (True, -1)
    packed = _mask(lambda n, table: torch.arange(KEYS)[None, None, None] <= (n[:, None] - QUERIES + torch.arange(
        QUERIES)).view(2, 1, QUERIES, 1), torch.tensor([3, 5]), torch.zeros(2, 1))
    assert isinstance(packed, Causal), packed
    assert (packed.by_request, packed.const) == (True, -QUERIES)


@pytest.mark.parametrize("fn", [
    lambda n: torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + n[:, None],  # a length per query
    lambda n: torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + n.flip(0)[None, :, None, None] - n[:1],
    lambda n: torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + 2 * n[:, None, None],
    lambda n: torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + n[:, None, None] + n[None, :, None],
])
def test_other_rows_of_lengths_are_refused(fn: Callable[..., torch.Tensor]) -> None:
    assert isinstance(_mask(fn, torch.tensor([3, 5, 4])), str)


def test_positions_that_are_given_are_no_proof() -> None:
    def fn(positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(KEYS)[None, :] <= positions[:, None]

    assert "the positions of the queries are given" in str(_mask(fn, torch.arange(QUERIES)))
