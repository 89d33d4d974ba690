"""fused_infer_attention_score_v2 against a softmax per token and head in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cannopy.backend.host.kernels import fused_infer_attention_score
from cannopy.fusion_rules.contracts import ContractError
from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION, torchair_op
from tests.kernels.numerics import assert_close, normal
from tests.kernels.paging import Requests

Call = dict[str, Any]
Parts = dict[str, list[torch.Tensor]]
SCALE = 0.07
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
HEADS = 4


def fused(**call: Any) -> torch.Tensor:
    out: torch.Tensor = torchair_op(FUSED_INFER_ATTENTION)(**call)[0]
    return out


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head of one token: q [D], k [keys, D], v [keys, Dv]; zeros where there is no key."""
    if not len(k):
        return torch.zeros(v.shape[1], dtype=torch.float64)
    logits = [SCALE * float(q.double() @ row.double()) for row in k]
    powers = (torch.tensor(logits, dtype=torch.float64) - max(logits)).exp()
    return sum((w * row.double() for w, row in zip(powers / powers.sum(), v, strict=True)),
               torch.zeros(v.shape[1], dtype=torch.float64))


def exact(requests: Requests, parts: Parts, kv_heads: int, causal: bool) -> torch.Tensor:
    """[T, N, Dv], float64."""
    rows = []
    for b, queries in enumerate(requests.queries):
        for i in range(queries):
            seen = requests.visible(b, i, 3 if causal else 0)
            heads = [h * kv_heads // HEADS for h in range(HEADS)]
            q, k = parts["q"][b][i], parts["k"][b][:seen]
            if "qr" in parts:
                q, k = torch.cat((q, parts["qr"][b][i]), -1), torch.cat((k, parts["kr"][b][:seen]), -1)
            rows.append(torch.stack([attended(q[h], k[:, g], parts["v"][b][:seen, g]) for h, g in enumerate(heads)]))
    return torch.stack(rows)


def operands(requests: Requests, kv_heads: int, dim: int, rope: bool = False) -> Parts:
    parts = {
        "q": [normal(n, HEADS, dim) for n in requests.queries],
        "k": [normal(n, kv_heads, dim) for n in requests.keys],
        "v": [normal(n, kv_heads, dim) for n in requests.keys],
    }
    if rope:
        parts["qr"] = [normal(n, HEADS, 64) for n in requests.queries]
        parts["kr"] = [normal(n, kv_heads, 64) for n in requests.keys]
    return parts


def common(requests: Requests, kv_heads: int, causal: bool, packed: bool) -> Call:
    call: Call = {"num_query_heads": HEADS, "num_key_value_heads": kv_heads, "softmax_scale": SCALE}
    if causal:
        call |= {"sparse_mode": 3, "atten_mask": MASK}
    if packed:
        call["actual_seq_qlen"] = requests.query_ends().long()
    return call | {"actual_seq_kvlen": requests.key_lengths().long()}


def blocks(requests: Requests, rows: list[torch.Tensor], table: torch.Tensor, block: int) -> torch.Tensor:
    """[blocks, block, heads · D]"""
    return requests.paged([r.flatten(1) for r in rows], table, block).squeeze(2)


def grouped(requests: Requests, layout: str, causal: bool) -> tuple[Call, Parts, torch.Tensor]:
    """A call in one of the batched layouts (all requests have the same number of queries) and its result as rows."""
    parts = operands(requests, 2, 48)
    call = common(requests, 2, causal, packed=False) | {"input_layout": layout}
    q = torch.stack(parts["q"])
    if layout == "paged":
        table = requests.block_table(128)
        call |= {"query": q, "block_table": table, "block_size": 128, "input_layout": "BSND"}
        call |= {name: blocks(requests, parts[name[0]], table, 128) for name in ("key", "value")}
        return call, parts, fused(**call).flatten(0, 1)
    k, v = (requests.batched(parts[name], max(requests.keys) + 3) for name in ("k", "v"))
    swapped = layout.startswith("BNSD")
    q, k, v = (t.transpose(1, 2).contiguous() if swapped else t for t in (q, k, v))
    call |= {"query": q, "key": k, "value": v}
    out = fused(**call)
    return call, parts, (out.transpose(1, 2) if layout == "BNSD" else out).flatten(0, 1)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "paged"])
def test_one_query_per_request_sees_all_keys_of_its_length(layout: str) -> None:
    requests = Requests([1, 1, 1], [33, 1, 128])
    _, parts, found = grouped(requests, layout, causal=False)
    assert_close(found, exact(requests, parts, 2, causal=False), slack=2e-5)


@pytest.mark.parametrize("layout", ["BNSD", "BNSD_BSND", "BSND", "paged"])
def test_several_queries_end_with_the_last_key(layout: str) -> None:
    requests = Requests([3, 3], [3, 40])
    _, parts, found = grouped(requests, layout, causal=True)
    assert_close(found, exact(requests, parts, 2, causal=True), slack=2e-5)


def latent(requests: Requests, causal: bool, layout: str = "TND_NTD", block: int = 16) -> tuple[Call, Parts]:
    parts = operands(requests, 1, 512, rope=True)
    parts["v"] = parts["k"]
    table = requests.block_table(block)
    cache = blocks(requests, parts["k"], table, block)
    call = common(requests, 1, causal, packed=True) | {
        "query": requests.packed(parts["q"]), "query_rope": requests.packed(parts["qr"]), "key": cache, "value": cache,
        "key_rope": blocks(requests, parts["kr"], table, block), "block_table": table, "block_size": block,
        "input_layout": layout,
    }
    return call, parts


@pytest.mark.parametrize(("queries", "causal"), [([1, 1, 1], False), ([4, 1, 2], True)])
@pytest.mark.parametrize("layout", ["TND_NTD", "TND"])
def test_latent_attention_over_a_paged_cache(queries: list[int], causal: bool, layout: str) -> None:
    requests = Requests(queries, [20, 1, 33])
    call, parts = latent(requests, causal, layout)
    found = fused(**call)
    found = found.transpose(0, 1) if layout == "TND_NTD" else found
    assert_close(found, exact(requests, parts, 1, causal), slack=2e-5)


@pytest.mark.parametrize("layout", ["TND_NTD", "TND"])
def test_parts_of_the_keys_join_by_their_lse(layout: str) -> None:
    """Requests of one query each; the third part has keys of the first request only."""
    whole, kept = Requests([1, 1], [20, 9]), [[4, 4], [9, 5], [7, 0]]
    call, parts = latent(whole, False, layout)
    outs, sums, first = [], [], [0, 0]
    for counts in kept:
        few = Requests([1, 1], counts)
        rows = {k: [t[a : a + n] for t, a, n in zip(parts[k], first, counts, strict=True)] for k in ("k", "kr")}
        table = few.block_table(16)
        cache = blocks(few, rows["k"], table, 16)
        out, lse = torchair_op(FUSED_INFER_ATTENTION)(**{
            **call, "key": cache, "value": cache, "key_rope": blocks(few, rows["kr"], table, 16), "block_table": table,
            "actual_seq_kvlen": torch.tensor(counts), "return_softmax_lse": True})
        assert (lse.shape, lse.dtype) == ((2, HEADS, 1), torch.float32)
        assert [bool(lse[b].isnan().all()) for b in range(2)] == [n == 0 for n in counts]
        outs.append((out.transpose(0, 1) if layout == "TND_NTD" else out).reshape(-1, 512))
        sums.append(lse.nan_to_num(-1e30).flatten())
        first = [a + n for a, n in zip(first, counts, strict=True)]
    found, total = torch.ops.npu.npu_attention_update(sums, outs, 1)
    error = (found.view(2, HEADS, 512).double() - exact(whole, parts, 1, False)).abs().max()
    assert error < 2.0**-8 * exact(whole, parts, 1, False).abs().max()  # every part was rounded to bfloat16
    _, alone = torchair_op(FUSED_INFER_ATTENTION)(**{**call, "return_softmax_lse": True})
    assert_close(total, alone.flatten().double(), slack=1e-5)
    assert torch.ops.npu.npu_attention_update(sums, outs, 0)[1].isnan().all()


def expanded(requests: Requests, layout: str, rope: bool, kv_heads: int) -> tuple[Call, Parts]:
    parts = operands(requests, kv_heads, 128, rope)
    call = common(requests, kv_heads, True, packed=True) | {"input_layout": layout}
    call["actual_seq_kvlen"] = requests.key_ends().long()
    names = {"query": "q", "key": "k", "value": "v"} | ({"query_rope": "qr", "key_rope": "kr"} if rope else {})
    for name, part in names.items():
        rows = requests.packed(parts[part])
        call[name] = rows.transpose(0, 1).contiguous() if layout == "NTD_TND" else rows
    return call, parts


@pytest.mark.parametrize(("layout", "rope", "kv_heads"), [("NTD_TND", True, 4), ("TND", True, 4), ("TND", False, 2)])
def test_packed_requests_do_not_see_each_other(layout: str, rope: bool, kv_heads: int) -> None:
    requests = Requests([5, 0, 2], [5, 4, 9])
    call, parts = expanded(requests, layout, rope, kv_heads)
    assert_close(fused(**call), exact(requests, parts, kv_heads, True), slack=2e-5)


def test_a_query_before_all_keys_gives_zeros() -> None:
    requests = Requests([3], [2])
    call, _ = expanded(requests, "TND", False, 2)
    assert fused(**call)[0].eq(0).all()


def test_lse_of_batched_queries() -> None:
    requests = Requests([2, 2], [2, 9])
    call, parts, _ = grouped(requests, "BNSD", causal=True)
    lse = torchair_op(FUSED_INFER_ATTENTION)(**call, return_softmax_lse=True)[1]
    assert lse.shape == (2, HEADS, 2, 1)
    seen, q, k = requests.visible(1, 0, 3), parts["q"][1][0], parts["k"][1]
    scores = SCALE * (q[3].double() @ k[:seen, 1].double().T)
    assert float(lse[1, 3, 0, 0]) == pytest.approx(float(scores.logsumexp(0)), abs=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = expanded(Requests([9], [21]), "TND", False, 2)
    whole = fused(**call)
    monkeypatch.setattr(fused_infer_attention_score, "SCORES", 2 * HEADS * 21)
    assert_close(fused(**call), whole.double(), ulps=1)


def test_lengths_as_lists_are_the_same_call() -> None:
    call, _ = latent(Requests([2], [20]), True)
    lists = {n: v.tolist() if n.startswith("actual") else v for n, v in call.items()}
    assert torch.equal(torch.ops.npu.npu_fused_infer_attention_score_v2(**lists)[0], fused(**call))


def _some_other_mask(call: Call) -> None:
    call["atten_mask"] = MASK.t().contiguous()


def _unknown_block(call: Call) -> None:
    call["block_table"] = call["block_table"] + 1000


def _longer(call: Call) -> None:
    call["actual_seq_kvlen"] = call["actual_seq_kvlen"] + 1000


def _not_all_queries(call: Call) -> None:
    call["actual_seq_qlen"] = call["actual_seq_qlen"] - 1


def _no_mask(call: Call) -> None:
    call |= {"atten_mask": None, "sparse_mode": 0}


@pytest.mark.parametrize(("change", "rule"), [
    (_some_other_mask, "mask-triangle"), (_unknown_block, "block-range"), (_longer, "key-lengths"),
    (_not_all_queries, "query-lengths"), (_no_mask, "latent-queries"),
])
def test_contents_that_the_op_does_not_take(change: Callable[[Call], None], rule: str) -> None:
    call, _ = latent(Requests([2], [20]), True)
    change(call)
    with pytest.raises(ContractError, match=rf"clause {rule};"):
        fused(**call)


def test_more_queries_than_latent_attention_takes() -> None:
    call, _ = latent(Requests([17], [20]), True)
    with pytest.raises(ContractError, match="clause latent-queries;"):
        fused(**call)
