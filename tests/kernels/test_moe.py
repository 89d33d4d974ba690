"""Routing ops against token loops written from their documentation."""

from __future__ import annotations

import math

import pytest
import torch

from cannopy.fusion_rules.contracts import ContractError
from tests.features import needs_argument, takes
from tests.kernels.numerics import assert_close, ints, normal


def gate_row(
    logits: list[float], bias: list[float] | None, k: int, groups: int, kept: int, mode: int, sigmoid: bool
) -> tuple[list[int], list[float]]:
    """Expert ids and scores of one token, by sorting plain lists; equal values keep the lower id."""
    if sigmoid:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    choice = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
    size = len(logits) // groups
    members = [choice[g * size : (g + 1) * size] for g in range(groups)]
    rank = [sum(sorted(m)[-2:]) if mode == 1 else max(m) for m in members]
    best = sorted(range(groups), key=lambda g: -rank[g])[:kept]
    allowed = [e for e in range(len(logits)) if e // size in best]
    return sorted(allowed, key=lambda e: -choice[e])[:k], scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("groups", "kept", "mode"), [(4, 2, 1), (4, 2, 0), (1, 1, 0)])
def test_gating(dtype: torch.dtype, with_bias: bool, sigmoid: bool, groups: int, kept: int, mode: int) -> None:
    x = normal(9, 16, dtype=dtype)
    bias = normal(16, dtype=dtype) if with_bias else None
    y, ids, norm = torch.ops.npu.npu_moe_gating_top_k(
        x,
        4,
        bias=bias,
        k_group=kept,
        group_count=groups,
        group_select_mode=mode,
        norm_type=int(sigmoid),
        out_flag=True,
        routed_scaling_factor=2.5,
        eps=1e-3,
    )
    assert (y.dtype, ids.dtype, norm.dtype) == (dtype, torch.int32, torch.float32)
    bias_list = bias.double().tolist() if bias is not None else None
    for row, logits in enumerate(x.double().tolist()):
        picks, scores = gate_row(logits, bias_list, 4, groups, kept, mode, sigmoid)
        assert ids[row].tolist() == picks
        weights = [scores[e] for e in picks]
        total = sum(weights) + 1e-3 if sigmoid else 1.0
        exact = torch.tensor([w / total * 2.5 for w in weights], dtype=torch.float64)
        assert_close(y[row], exact, ulps=0.51 if dtype != torch.float32 else 6)
        assert_close(norm[row], torch.tensor(scores, dtype=torch.float64), ulps=6)


def test_gating_ties_take_the_lowest_ids() -> None:
    _, ids, norm = torch.ops.npu.npu_moe_gating_top_k(
        torch.zeros(2, 16), 4, k_group=2, group_count=4, group_select_mode=1, norm_type=1
    )
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert norm.eq(0).all()


def test_gating_bias_steers_the_choice_and_not_the_weight() -> None:
    bias = torch.zeros(16)
    bias[11] = 5.0
    y, ids, _ = torch.ops.npu.npu_moe_gating_top_k(torch.zeros(1, 16), 2, bias=bias, norm_type=1)
    assert ids.tolist() == [[11, 0]]
    assert y.tolist() == [[0.5, 0.5]]


PICKS = [[3, 1, 0], [1, 2, 3], [0, 3, 1], [5, 1, 4], [3, 0, 5]]


def routed(first: int, last: int) -> tuple[list[int], list[int]]:
    """(pairs in order of expert, experts): pair i·K+k is the k-th choice of token i."""
    pairs = [(e, i * 3 + k) for i, row in enumerate(PICKS) for k, e in enumerate(row) if first <= e < last]
    pairs.sort()
    return [p for _, p in pairs], [e for e, _ in pairs]


@pytest.mark.parametrize("span", [[0, 6], [1, 4], []])
@pytest.mark.parametrize("row_idx_type", [0, 1])
@pytest.mark.parametrize("active_num", [-1, 0, 15, 4])
def test_init_routing(span: list[int], row_idx_type: int, active_num: int) -> None:
    x, scale = normal(5, 7), torch.rand(5)
    order, experts = routed(*(span or [0, 6]))
    expanded, row_idx, counts, row_scale = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        torch.tensor(PICKS, dtype=torch.int32),
        scale=scale,
        active_num=active_num,
        expert_num=6,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=span,
        row_idx_type=row_idx_type,
    )
    rows = 15 if active_num <= 0 else active_num
    assert expanded.shape == (rows, 7)
    for row in range(rows):
        filled = row < len(order)
        assert torch.equal(expanded[row], x[order[row] // 3] if filled else torch.zeros_like(x[0]))
        assert float(row_scale[row]) == (float(scale[order[row] // 3]) if filled else 0.0)
    if row_idx_type == 1:
        assert row_idx.tolist() == order + [-1] * (15 - len(order))
    else:
        assert row_idx.tolist() == [order.index(pair) if pair in order else -1 for pair in range(15)]
    first, last = span or [0, 6]
    assert counts.tolist() == [experts.count(e) for e in range(first, last)]
    assert (row_idx.dtype, counts.dtype) == (torch.int32, torch.int64)


def test_init_routing_count_forms() -> None:
    x, picks = normal(5, 7), torch.tensor(PICKS, dtype=torch.int32)

    def counts(kind: int, flag: bool = True) -> torch.Tensor:
        result: torch.Tensor = torch.ops.npu.npu_moe_init_routing_v2(
            x, picks, expert_num=6, expert_tokens_num_type=kind, expert_tokens_num_flag=flag, active_expert_range=[1, 4]
        )[2]
        return result

    assert counts(1).tolist() == [4, 1, 4]
    assert counts(0).tolist() == [4, 5, 9]
    assert counts(2).tolist() == [[1, 4], [2, 1], [3, 4], [0, 0], [0, 0], [0, 0]]
    assert counts(1, flag=False).shape == ()


@pytest.mark.parametrize("bad", [-1, 6])
def test_init_routing_refuses_an_unknown_expert(bad: int) -> None:
    with pytest.raises(ContractError, match=f"argument 'expert_idx'.*{bad} at pair 1, 6 experts"):
        torch.ops.npu.npu_moe_init_routing_v2(normal(2, 4), ints(0, bad).view(2, 1), expert_num=6)


@pytest.mark.parametrize("quant_mode", [0, 1])
def test_init_routing_refuses_quantisation(quant_mode: int) -> None:
    with pytest.raises(ContractError, match="host-quant"):
        torch.ops.npu.npu_moe_init_routing_v2(
            normal(2, 4), ints(0, 1).view(2, 1), scale=torch.ones(1), expert_num=6, quant_mode=quant_mode
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("parts", ["all", "skip1", "scales", "bare"])
def test_finalize_routing(dtype: torch.dtype, mode: int, parts: str) -> None:
    if parts in ("skip1", "bare"):  # without scales only k tells how many rows a token has
        needs_argument("npu_moe_finalize_routing", "k")
    tokens, top, width = 5, 3, 7
    rows = normal(15, width, dtype=dtype)
    place = torch.randperm(15)
    if mode in (1, 3):
        place[place == 4] = -1  # dropped
    bias, skip1, skip2 = (normal(n, width, dtype=dtype) for n in (6, tokens, tokens))
    scales, experts = normal(tokens, top, dtype=dtype), torch.randint(0, 6, (tokens, top))
    full = parts == "all"
    use_scales, use_skip1 = parts in ("all", "scales"), parts in ("all", "skip1")
    y = torch.ops.npu.npu_moe_finalize_routing(
        rows if mode in (0, 2) else rows.view(3, 5, width),
        skip1 if use_skip1 else None,
        skip2 if full else None,
        bias if full else None,
        scales if use_scales else None,
        place.to(torch.int32),
        experts.to(torch.int32) if full else None,
        mode,
        *([top] if takes("npu_moe_finalize_routing", "k") else []),
    )
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    size = torch.zeros(tokens, width, dtype=torch.float64)
    for i in range(tokens):
        terms = [skip1[i].double()] * use_skip1 + [skip2[i].double()] * full
        for k in range(top):
            source = int(place[i * top + k] if mode in (2, 3) else place[k * tokens + i])
            row = rows[source].double() if source >= 0 else torch.zeros(width, dtype=torch.float64)
            row = row + (bias[experts[i, k]].double() if full else 0)
            terms.append(row * (float(scales[i, k]) if use_scales else 1.0))
        exact[i], size[i] = sum(terms), sum(term.abs() for term in terms)
    assert_close(y, exact, slack=size * 2.0**-21)


def test_finalize_routing_takes_fp32_scales_with_bf16_rows() -> None:
    rows, scales = normal(4, 6), torch.rand(2, 2)
    y = torch.ops.npu.npu_moe_finalize_routing(rows, None, None, None, scales, ints(2, 0, 1, 3), None, 2)
    first = rows[2].double() * float(scales[0, 0]) + rows[0].double() * float(scales[0, 1])
    assert y.dtype == torch.bfloat16
    assert_close(y[0], first, slack=1e-6)


@pytest.mark.parametrize("bad", [4, -1])
def test_finalize_routing_refuses_a_row_that_is_not_there(bad: int) -> None:
    with pytest.raises(ContractError, match=f"expanded_src_to_dst_row.*{bad} at position 3, 4 rows"):
        torch.ops.npu.npu_moe_finalize_routing(
            normal(4, 6), None, None, None, normal(2, 2), ints(2, 0, 1, bad), None, 2
        )


def test_pairs_outside_of_the_range_of_experts_add_nothing() -> None:
    """As a router with zero experts is used: their pairs have row -1, which only the drop modes take."""
    x, picks, weights = normal(5, 7), torch.tensor(PICKS, dtype=torch.int32), normal(5, 3)
    expanded, place, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, picks, expert_num=6, active_expert_range=[0, 4], expert_tokens_num_type=1, expert_tokens_num_flag=True
    )
    assert counts.tolist() == [int((picks == e).sum()) for e in range(4)]
    assert ((place.view(5, 3) < 0) == (picks >= 4)).all()
    assert (picks >= 4).any()
    expanded[int(counts.sum()):] = torch.nan  # the device leaves these rows unset
    y = torch.ops.npu.npu_moe_finalize_routing(
        expanded.view(3, 5, 7), None, None, None, weights, place, None, 3
    )
    kept = weights.double() * (picks < 4)
    assert_close(y, x.double() * kept.sum(1, keepdim=True), slack=x.double().abs() * kept.abs().sum(1, True) * 2.0**-21)
    with pytest.raises(ContractError, match="-1 at position"):
        torch.ops.npu.npu_moe_finalize_routing(expanded, None, None, None, weights, place, None, 2)


def test_routing_there_and_back_is_the_weighted_sum_of_copies() -> None:
    x, picks, weights = normal(5, 7), torch.tensor(PICKS, dtype=torch.int32), normal(5, 3)
    expanded, place, _, _ = torch.ops.npu.npu_moe_init_routing_v2(x, picks, expert_num=6)
    y = torch.ops.npu.npu_moe_finalize_routing(expanded, None, None, None, weights, place, None, 2)
    exact = x.double() * weights.double().sum(1, keepdim=True)
    assert_close(y, exact, slack=x.double().abs() * weights.double().abs().sum(1, keepdim=True) * 2.0**-21)
