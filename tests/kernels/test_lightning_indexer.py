"""lightning_indexer against a score loop per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.kernels.numerics import ints, normal
from tests.kernels.paging import Requests

REQUESTS = [Requests([1, 1, 1], [40, 1, 17]), Requests([5, 3], [5, 33]), Requests([4, 0, 2], [40, 3, 1])]


def scores(q: torch.Tensor, keys: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_h w[h]·max(q[h]·k, 0) for each key, float64."""
    total = torch.zeros(keys.shape[0], dtype=torch.float64)
    for head in range(q.shape[0]):
        for s in range(keys.shape[0]):
            total[s] += float(w[head]) * max(float(torch.dot(q[head].double(), keys[s].double())), 0.0)
    return total


def arguments(requests: Requests, layout: str, parts: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """The call's arguments for per-request parts q [n,N,128], k [m,128], w [n,N]."""
    if layout == "BSND":
        size_q, size_k = max(requests.queries) + 1, max(requests.keys) + 2
        return {
            "query": requests.batched(parts["q"], size_q),
            "key": requests.batched(parts["k"], size_k).unsqueeze(2),
            "weights": requests.batched(parts["w"], size_q),
            "actual_seq_lengths_query": requests.query_lengths(),
            "actual_seq_lengths_key": requests.key_lengths(),
        }
    call: dict[str, Any] = {
        "query": requests.packed(parts["q"]),
        "weights": requests.packed(parts["w"]),
        "actual_seq_lengths_query": requests.query_ends(),
        "layout_query": "TND",
        "layout_key": layout,
    }
    if layout == "TND":
        return call | {
            "key": requests.packed(parts["k"]).unsqueeze(1),
            "actual_seq_lengths_key": requests.key_ends(),
        }
    table = requests.block_table(16)
    return call | {
        "key": requests.paged(parts["k"], table, 16),
        "actual_seq_lengths_key": requests.key_lengths(),
        "block_table": table,
    }


@pytest.mark.parametrize("layout", ["PA_BSND", "TND", "BSND"])
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("requests", REQUESTS, ids=lambda r: f"{r.queries}-{r.keys}")
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
def test_picks_are_the_best_keys_in_order(
    layout: str, mode: int, requests: Requests, weights_dtype: torch.dtype
) -> None:
    parts = {
        "q": [normal(n, 2, 128) for n in requests.queries],
        "k": [normal(n, 128) for n in requests.keys],
        "w": [normal(n, 2, dtype=weights_dtype) for n in requests.queries],
    }
    call = arguments(requests, layout, parts)
    picks, values = torch.ops.npu.npu_lightning_indexer(**call, sparse_count=8, sparse_mode=mode)
    assert picks.dtype == torch.int32
    assert values.shape == (0,)
    assert picks.shape == (*call["query"].shape[:-2], 1, 8)
    row = 0
    for b, (q, k, w) in enumerate(zip(parts["q"], parts["k"], parts["w"], strict=True)):
        for i in range(q.shape[0]):
            found = (picks[b, i, 0] if layout == "BSND" else picks[row, 0]).tolist()
            row += 1
            seen = requests.visible(b, i, mode)
            exact = scores(q[i], k[:seen], w[i])
            count = min(8, seen)
            assert found[count:] == [-1] * (8 - count)
            chosen = found[:count]
            assert len(set(chosen)) == count
            assert all(0 <= p < seen for p in chosen)
            best = exact.sort(descending=True).values[:count]
            tolerance = 2.0**-18 * float(exact.abs().max()) if seen else 0.0
            assert ((exact[chosen] - best).abs() <= tolerance).all()
        if layout == "BSND":
            assert picks[b, q.shape[0] :].eq(-1).all()


def test_ties_take_the_lowest_positions_first() -> None:
    query = torch.ones(1, 1, 128, dtype=torch.bfloat16)
    keys = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16)
    keys[0, 5], keys[0, 9] = 1.0, 1.0
    picks, _ = torch.ops.npu.npu_lightning_indexer(
        query,
        keys,
        torch.ones(1, 1, dtype=torch.bfloat16),
        actual_seq_lengths_query=ints(1),
        actual_seq_lengths_key=ints(16),
        block_table=ints(0).view(1, 1),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=6,
    )
    assert picks.flatten().tolist() == [5, 9, 0, 1, 2, 3]


def test_negative_products_do_not_count_and_negative_weights_do() -> None:
    query = torch.stack((torch.ones(128), -torch.ones(128))).bfloat16().view(1, 2, 128)
    keys = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16)
    keys[0, 3], keys[0, 7] = 1.0, -1.0  # head 0 sees 3, head 1 sees 7
    picks, _ = torch.ops.npu.npu_lightning_indexer(
        query,
        keys,
        torch.tensor([[1.0, -1.0]]).bfloat16(),
        actual_seq_lengths_query=ints(1),
        actual_seq_lengths_key=ints(16),
        block_table=ints(0).view(1, 1),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=16,
    )
    assert picks.flatten().tolist() == [3, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 7]


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cannopy.backend.host.kernels import lightning_indexer

    requests = Requests([9], [40])
    parts = {"q": [normal(9, 2, 128)], "k": [normal(40, 128)], "w": [normal(9, 2)]}
    call = arguments(requests, "PA_BSND", parts)
    whole, _ = torch.ops.npu.npu_lightning_indexer(**call, sparse_count=8)
    monkeypatch.setattr(lightning_indexer, "CHUNK_ELEMENTS", 2 * 40 * 2)
    chunked, _ = torch.ops.npu.npu_lightning_indexer(**call, sparse_count=8)
    assert torch.equal(whole, chunked)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"actual_seq_lengths_query": ints(3, 2)}, "query-lengths"),
        ({"actual_seq_lengths_query": ints(2, 9)}, "query-lengths"),
        ({"actual_seq_lengths_key": ints(5, 49)}, "key-lengths"),
        ({"actual_seq_lengths_key": ints(5, -1)}, "key-lengths"),
        ({"block_table": ints(0, 1, 2, 2, -1, 1).view(2, 3)}, "block-range"),
        ({"block_table": ints(0, 1, 2, 2, 4, 1).view(2, 3)}, "block-range"),
    ],
)
def test_lengths_and_blocks_outside_the_tensors_are_refused(change: dict[str, torch.Tensor], rule: str) -> None:
    call = {
        "query": normal(6, 2, 128),
        "key": normal(4, 16, 1, 128),
        "weights": normal(6, 2),
        "actual_seq_lengths_query": ints(3, 6),
        "actual_seq_lengths_key": ints(5, 33),
        "block_table": ints(0, 99, 99, 2, 3, 1).view(2, 3),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": 4,
    }
    torch.ops.npu.npu_lightning_indexer(**call)
    with pytest.raises(ContractError, match=rf"clause {rule};"):
        torch.ops.npu.npu_lightning_indexer(**(call | change))
