"""sparse_flash_attention against a softmax per token and head in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.features import needs_argument
from tests.kernels.numerics import assert_close, ints, normal
from tests.kernels.paging import Requests

REQUESTS = [Requests([1, 1, 1], [40, 1, 17]), Requests([5, 3], [5, 33])]
SCALE = 0.07


def attended(
    q: torch.Tensor, q_rope: torch.Tensor, k: torch.Tensor, k_rope: torch.Tensor, rows: list[int]
) -> torch.Tensor:
    """[N,512] of one token: softmax over exactly `rows`; zeros if there are none."""
    out = torch.zeros(q.shape[0], 512, dtype=torch.float64)
    for head in range(q.shape[0]):
        logits = [
            SCALE * float(q[head].double() @ k[r].double() + q_rope[head].double() @ k_rope[r].double()) for r in rows
        ]
        if not rows:
            continue
        powers = torch.tensor(logits, dtype=torch.float64)
        powers = (powers - powers.max()).exp()
        for weight, r in zip((powers / powers.sum()).tolist(), rows, strict=True):
            out[head] += weight * k[r].double()
    return out


def picks(requests: Requests, count: int, block: int) -> list[torch.Tensor]:
    """Distinct block numbers per token in random order, some past what the token may see, -1 at the end."""
    parts = []
    for queries, keys in zip(requests.queries, requests.keys, strict=True):
        blocks = -(-keys // block)
        part = torch.full((queries, count), -1, dtype=torch.int32)
        for i in range(queries):
            chosen = torch.randperm(blocks + 1)[: count - 1].to(torch.int32)
            part[i, : chosen.numel()] = chosen
        parts.append(part)
    return parts


def arguments(requests: Requests, layout: str, parts: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    names = {"query": "q", "query_rope": "qr", "sparse_indices": "i"}
    keys = {"key": "k", "key_rope": "kr"}
    if layout == "BSND":
        size_q, size_k = max(requests.queries) + 1, max(requests.keys) + 2
        call: dict[str, Any] = {
            **{name: requests.batched(parts[part], size_q) for name, part in names.items()},
            **{name: requests.batched(parts[part], size_k).unsqueeze(2) for name, part in keys.items()},
            "actual_seq_lengths_query": requests.query_lengths(),
            "actual_seq_lengths_kv": requests.key_lengths(),
        }
    else:
        call = {name: requests.packed(parts[part]) for name, part in names.items()}
        call |= {"actual_seq_lengths_query": requests.query_ends(), "layout_query": "TND", "layout_kv": layout}
        if layout == "TND":
            call |= {name: requests.packed(parts[part]).unsqueeze(1) for name, part in keys.items()}
            call["actual_seq_lengths_kv"] = requests.key_ends()
        else:
            table = requests.block_table(16)
            call |= {name: requests.paged(parts[part], table, 16) for name, part in keys.items()}
            call |= {"actual_seq_lengths_kv": requests.key_lengths(), "block_table": table}
    call["sparse_indices"] = call["sparse_indices"].unsqueeze(-2)
    return call | {"value": call["key"], "scale_value": SCALE, "attention_mode": 2}


def operands(requests: Requests, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    return {
        "q": [normal(n, 2, 512, dtype=dtype) for n in requests.queries],
        "qr": [normal(n, 2, 64, dtype=dtype) for n in requests.queries],
        "k": [normal(n, 512, dtype=dtype) for n in requests.keys],
        "kr": [normal(n, 64, dtype=dtype) for n in requests.keys],
    }


@pytest.mark.parametrize("layout", ["PA_BSND", "TND", "BSND"])
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("requests", REQUESTS, ids=lambda r: f"{r.queries}-{r.keys}")
def test_attention_over_the_named_keys(layout: str, mode: int, block: int, requests: Requests) -> None:
    parts = operands(requests, torch.bfloat16)
    parts["i"] = picks(requests, 8, block)
    call = arguments(requests, layout, parts)
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(**call, sparse_mode=mode, sparse_block_size=block)
    assert out.shape == call["query"].shape
    row = 0
    for b, chosen in enumerate(parts["i"]):
        for i in range(chosen.shape[0]):
            seen = requests.visible(b, i, mode)
            rows = [int(p) * block + d for p in chosen[i] if p >= 0 for d in range(block)]
            rows = [r for r in rows if r < seen]
            exact = attended(parts["q"][b][i], parts["qr"][b][i], parts["k"][b], parts["kr"][b], rows)
            got = out[b, i] if layout == "BSND" else out[row]
            # fp32 logits of size ~5 are off by ~1e-6, so weights are too, relatively.
            assert_close(got, exact, ulps=0.51, slack=2e-5)
            row += 1
        if layout == "BSND":
            assert out[b, chosen.shape[0] :].eq(0).all()


def test_a_token_that_sees_nothing_gives_zeros() -> None:
    requests = Requests([2], [1])
    parts = operands(requests, torch.bfloat16)
    parts["i"] = [ints(0, -1, 0, -1).view(2, 2)]
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(**arguments(requests, "PA_BSND", parts), sparse_mode=3)
    assert out[0].eq(0).all()
    assert torch.equal(out[1], parts["k"][0][0].expand(2, 512))


def test_full_selection_is_causal_attention() -> None:
    requests = Requests([6], [6])
    parts = operands(requests, torch.float16)
    parts["i"] = [torch.arange(6, dtype=torch.int32).repeat(6, 1)]
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(**arguments(requests, "PA_BSND", parts), sparse_mode=3)
    keys = torch.cat((parts["k"][0], parts["kr"][0]), dim=1).double()
    q = torch.cat((parts["q"][0], parts["qr"][0]), dim=2).double().transpose(0, 1)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, keys.expand(2, 6, 576), parts["k"][0].double().expand(2, 6, 512), is_causal=True, scale=SCALE
    )
    assert_close(out, exact.transpose(0, 1), slack=2e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cannopy.backend.host.kernels import sparse_flash_attention

    requests = Requests([9], [40])
    parts = operands(requests, torch.bfloat16)
    parts["i"] = picks(requests, 8, 1)
    call = arguments(requests, "PA_BSND", parts)
    whole, _, _ = torch.ops.npu.npu_sparse_flash_attention(**call)
    monkeypatch.setattr(sparse_flash_attention, "CHUNK_ELEMENTS", 8 * 576 * 2)
    chunked, _, _ = torch.ops.npu.npu_sparse_flash_attention(**call)
    assert_close(chunked, whole.double(), ulps=1)


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        ({"attention_mode": 0}, "attention-mode"),
        ({"return_softmax_lse": True}, "no-lse"),
        ({"sinks": torch.zeros(2)}, "no-sinks"),
        ({"value": None}, "value-given"),
        ({"query_rope": None}, "query-rope-given"),
        ({"sparse_mode": 4}, "sparse-mode"),
        ({"actual_seq_lengths_query": ints(7)}, "query-lengths"),
        ({"actual_seq_lengths_kv": ints(999)}, "key-lengths"),
    ],
)
def test_refusals(change: dict[str, Any], clause: str) -> None:
    needs_argument("npu_sparse_flash_attention", *change)
    requests = Requests([6], [6])
    parts = operands(requests, torch.bfloat16)
    parts["i"] = picks(requests, 4, 1)
    call = arguments(requests, "PA_BSND", parts)
    with pytest.raises(ContractError, match=rf"clause {clause};"):
        torch.ops.npu.npu_sparse_flash_attention(**(call | change))
