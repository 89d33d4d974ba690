"""moe_gating_top_k: what fires, what is refused and why, and the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cannopy.fusion_rules.engine.stop import short
from cannopy.fusion_rules.rewrite.moe_gating_top_k import RULES
from tests.rules.moe_support import Tensor, Traced, assert_refused, block, captured, tokens, trace

OP = "npu_moe_gating_top_k"


@dataclass(frozen=True)
class Router:
    """A router written in plain PyTorch; the defaults are DeepSeek-V3's."""

    activation: str = "sigmoid"
    bias: str = "fp32"
    groups: int = 4
    k_group: int = 2
    group_score: str = "two"
    fill: float = -math.inf
    mask: str = "ones"
    k: int = 4
    weights_from: str = "scores"
    normed: bool = True
    eps: float | None = 1e-20
    factor: float = 2.5
    largest: bool = True
    group_largest: bool = True
    sum_dim: int = -1
    experts: int = 16
    ranked: int = 0
    divides: str = "chosen"

    def __call__(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        scores = self.scores(logits)
        choice = scores
        if self.bias in ("fp32", "bf16", "fp64"):
            choice = scores + bias
        elif self.bias == "number":
            choice = scores + 0.25
        choice_all = self.masked(choice) if self.groups else choice
        values, ids = torch.topk(choice_all, self.k, dim=-1, largest=self.largest, sorted=False)
        if self.weights_from == "values":
            weights = values
        else:
            source = {"scores": scores, "biased": choice, "masked": choice_all, "logits": logits}[self.weights_from]
            weights = source.gather(1, ids)
        if self.normed:
            total = weights.sum(dim=self.sum_dim, keepdim=True)
            above = weights if self.divides == "chosen" else scores[:, :self.k]
            weights = above / (total if self.eps is None else total + self.eps)
        return weights * self.factor, ids

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of every expert."""
        if self.activation == "softmax_tokens":
            return logits.softmax(dim=0)
        return logits.softmax(dim=-1) if self.activation == "softmax" else getattr(logits, self.activation)()

    def masked(self, choice: Tensor) -> Tensor:
        """``choice`` with ``fill`` outside the best groups."""
        ranked = self.ranked or self.groups
        grouped = choice.view(-1, ranked, self.experts // ranked)
        rank = {
            "two": lambda g: g.topk(2, dim=-1)[0].sum(dim=-1),
            "three": lambda g: g.topk(3, dim=-1)[0].sum(dim=-1),
            "max": lambda g: g.max(dim=-1)[0],
            "amax": lambda g: g.amax(dim=-1),
            "mean": lambda g: g.mean(dim=-1),
        }[self.group_score](grouped)
        ids = torch.topk(rank, self.k_group, dim=-1, largest=self.group_largest, sorted=False)[1]
        if self.mask == "reference":
            drop = rank.new_ones(rank.shape, dtype=torch.bool).scatter(1, ids, False)
            return grouped.masked_fill(drop.unsqueeze(-1), self.fill).flatten(1)
        if self.mask == "true":
            keep = torch.zeros_like(rank, dtype=torch.bool).scatter(1, ids, True)
            return grouped.masked_fill(~keep.unsqueeze(-1), self.fill).flatten(1)
        keep = rank.new_zeros((rank.shape[0], self.groups)).scatter(1, ids, 1)
        if self.mask == "cast first":
            return grouped.masked_fill(~keep.bool().unsqueeze(-1), self.fill).flatten(1)
        if self.mask == "cast, then spread":
            keep = keep.bool().unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups)
            return choice.masked_fill(~keep.reshape(-1, self.experts), self.fill)
        if self.mask == "equal":
            return grouped.masked_fill(keep[..., None] == 0, self.fill).flatten(1)
        if self.mask == "across":
            return grouped.masked_fill(keep[:, None] == 0, self.fill).flatten(1)
        if self.mask == "ones across":
            keep = keep.unsqueeze(1).expand(-1, self.experts // self.groups, -1).reshape(-1, self.experts)
            return choice.masked_fill(~keep.bool(), self.fill)
        keep = keep.unsqueeze(-1).expand(-1, self.groups, self.experts // self.groups).reshape(-1, self.experts)
        return choice.masked_fill(~keep.bool(), self.fill)

    def traced(self, rows: int = 9, seed: int = 0) -> Traced:
        """The router on random logits whose choice is clear."""
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn((rows, self.experts), generator=generator)
        bias = 0.2 * torch.randn(self.experts, generator=generator)
        dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(self.bias, torch.float32)
        return trace(self, logits, bias.to(dtype), parameters=[1])

    def exact(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(dense weights [T, E], chosen [T, E]) in float64, row by row."""
        dense = torch.zeros(logits.shape, dtype=torch.float64)
        chosen = torch.zeros(logits.shape, dtype=torch.bool)
        for t, row in enumerate(logits.double()):
            scores = 1 / (1 + (-row).exp()) if self.activation == "sigmoid" else row.exp() / row.exp().sum()
            choice = scores + bias.double() if self.bias in ("fp32", "bf16") else scores
            pool = set(range(self.experts))
            if self.groups:
                size = self.experts // self.groups
                best = 2 if self.group_score == "two" else 1
                rank = [sum(sorted(choice[g * size:(g + 1) * size].tolist())[-best:]) for g in range(self.groups)]
                kept = sorted(range(self.groups), key=lambda g: -rank[g])[: self.k_group]
                pool = {g * size + i for g in kept for i in range(size)}
            picks = sorted(pool, key=lambda e: -float(choice[e]))[: self.k]
            total = sum(float(scores[e]) for e in picks) + (self.eps or 0) if self.normed else 1.0
            for e in picks:
                dense[t, e] = float(scores[e]) / total * self.factor
                chosen[t, e] = True
        return dense, chosen


def spread(weights: Tensor, ids: Tensor, experts: int = 16) -> Tensor:
    """Weights [T, E], zero where not chosen."""
    return torch.zeros((ids.shape[0], experts), dtype=weights.dtype).scatter(1, ids, weights)


SOFTMAX = Router(activation="softmax", bias="none", normed=False, group_score="max", fill=0.0, factor=16.0)
FIRES: dict[str, tuple[Router, dict[str, Any]]] = {
    "v3": (Router(), {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "eps": 1e-20,
                      "routed_scaling_factor": 2.5}),
    "reference mask": (Router(mask="reference"), {"group_count": 4, "group_select_mode": 1}),
    "kept are True": (Router(mask="true"), {"group_count": 4, "k_group": 2}),
    "cast before the groups' dim": (Router(mask="cast first"), {"group_count": 4, "k_group": 2}),
    "cast before the spread": (Router(mask="cast, then spread"), {"group_count": 4, "k_group": 2}),
    "our zoo": (Router(mask="equal"), {"group_count": 4, "group_select_mode": 1}),
    "best of group": (Router(group_score="max"), {"group_select_mode": 0}),
    "amax of group": (Router(group_score="amax"), {"group_select_mode": 0}),
    "no groups": (Router(groups=0), {"k_group": 1, "group_count": 1}),
    "one group": (Router(groups=1, k_group=1), {"k_group": 1, "group_count": 1}),
    "no factor": (Router(factor=1.0), {"routed_scaling_factor": 1.0}),
    "no eps": (Router(eps=None), {"eps": 0.0}),
    "large eps": (Router(eps=0.1), {"eps": 0.1}),
    "no bias, 0.0 mask": (Router(bias="none", fill=0.0), {"bias": None, "group_count": 4}),
    "v2": (SOFTMAX, {"norm_type": 0, "group_select_mode": 0, "routed_scaling_factor": 16.0}),
    "v2 by values": (replace(SOFTMAX, weights_from="values"), {"norm_type": 0, "routed_scaling_factor": 16.0}),
    "softmax values": (replace(SOFTMAX, weights_from="values", groups=0, factor=1.0), {"norm_type": 0}),
    "softmax, renormalised after": (replace(SOFTMAX, groups=0, normed=True, factor=1.0), {"norm_type": 0}),
    "decode of one token": (Router(k=1), {"k_group": 2}),
    "bf16 bias": (Router(bias="bf16"), {"group_count": 4, "norm_type": 1}),
    "kimi k2": (Router(experts=384, groups=0, k=8, factor=2.827), {"group_count": 1, "routed_scaling_factor": 2.827}),
    "longcat": (Router("softmax", experts=768, groups=0, k=12, normed=False, factor=6.0),
                {"norm_type": 0, "group_count": 1, "routed_scaling_factor": 6.0}),
}


@pytest.mark.parametrize("name", FIRES)
def test_fires_on_exact_forms(name: str) -> None:
    router, expected = FIRES[name]
    before = router.traced()
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_gating_top_k": 1}
    assert log.misses == []
    (call,) = after.calls(OP)
    assert {k: call[k] for k in expected} == expected
    assert "aten.topk.default" not in after.operations()
    weights, ids = after.run()
    assert ids.dtype == torch.int64
    logits, bias = before.values.values()
    dense, chosen = router.exact(logits, bias)
    all_weights = spread(weights, ids, router.experts)
    assert torch.equal(spread(torch.ones_like(weights), ids, router.experts).bool(), chosen)
    torch.testing.assert_close(all_weights.double(), dense, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(all_weights, spread(*before.run(), router.experts), rtol=1e-6, atol=0.0)


REFUSES: dict[str, tuple[Router, str]] = {
    "biased weights": (Router(weights_from="biased"), "the weights are taken from biased scores"),
    "masked weights": (Router(weights_from="masked"), "the weights are taken from biased scores"),
    "biased values": (Router(activation="softmax", weights_from="values", normed=False), "taken from biased scores"),
    "logits as weights": (Router(weights_from="logits"), "the weights are taken from an input or weight float32"),
    "not normed": (Router(normed=False), "the sigmoid scores are not divided by (their sum + eps)"),
    "others over their sum": (Router(divides="first"), "the sum of the chosen scores divides aten.slice float32[9, 4]"),
    "summed over tokens": (Router(sum_dim=0), "not divided by the sum over the chosen experts"),
    "0.0 mask with bias": (Router(fill=0.0), "dropped experts get the score 0.0, not -inf"),
    "other mask": (Router(fill=-1.0), "dropped experts get the score -1"),
    "experts of all groups": (Router(mask="across"), "must stay or go as a whole, the mask is [9, 1, 4]"),
    "every fourth expert": (Router(mask="ones across"), "must stay or go as a whole, the mask is [9, 1, 4]"),
    "top three": (Router(group_score="three"), "a group's score is the sum of its 3 best"),
    "mean of group": (Router(group_score="mean"), "found aten.mean"),
    "smallest": (Router(largest=False), "does not take the largest scores"),
    "smallest groups": (Router(group_largest=False), "the groups with the largest scores must stay"),
    "fp64 bias": (Router(bias="fp64"), "to which that cannot be widened exactly"),
    "number as bias": (Router(bias="number"), "the bias must be a tensor of shape [16]"),
    "tanh": (Router(activation="tanh"), "found aten.tanh"),
    "softmax over tokens": (replace(SOFTMAX, activation="softmax_tokens"), "the softmax is not over the experts"),
    "ranked in other groups": (Router(ranked=2, k_group=1), "groups must be [tokens, groups, experts per group]"),
    "groups of two": (Router(groups=8, k_group=4), "[clause group-size"),
    "too many experts": (Router(experts=2049, groups=0), "[clause experts-max"),
    "too many groups": (Router(experts=512, groups=128, k_group=4), "[clause aligned-groups"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    router, reason = REFUSES[name]
    before = router.traced()
    after = assert_refused(before, RULES, reason)
    assert all(torch.equal(a, b) for a, b in zip(after.run(), before.run(), strict=True))


def test_a_refused_division_stands_for_the_form_without_one() -> None:
    _, log = Router(groups=8, k_group=4).traced().fused(RULES)
    assert ["group-size" in m.clause for m in log.misses] == [True], [m.reason for m in log.misses]


@pytest.mark.parametrize("fill", [-2.0, 3.0, -65504.0])
@pytest.mark.parametrize("mask", ["reference", "equal", "ones", "cast, then spread"])
def test_a_small_number_for_dropped_experts_is_named_where_it_is_filled_in(mask: str, fill: float) -> None:
    _, log = Router(fill=fill, mask=mask).traced().fused(RULES)
    (miss,) = [m for m in log.misses if m.near]
    assert log.counts() == {}
    assert f"dropped experts get the score {fill}, the op never takes them" in miss.reason
    assert miss.node.startswith("masked_fill")
    assert (miss.expected, miss.found) == ("-inf or 0.0", str(fill))


def test_refuses_weights_gathered_over_the_tokens() -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ids = scores.topk(4, dim=-1)[1]
        weights = scores.gather(0, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    logits = torch.randn((20, 16), generator=torch.Generator().manual_seed(0))
    assert_refused(trace(route, logits), RULES, "the weights are not gathered over the experts")


def test_a_division_of_softmax_scores_stays_behind_the_op() -> None:
    before = replace(SOFTMAX, groups=0, normed=True, factor=1.0).traced()
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_gating_top_k": 1}
    assert "aten.div.Tensor" in after.operations()
    reason = "softmax scores are divided by their sum after the choice, the op does not do that"
    assert reason in [a.reason for a in log.attempts]


def test_a_mask_of_zeros_fuses_where_the_bias_is_never_negative() -> None:
    before = Router(fill=0.0).traced()
    bias = before.program.inputs[1].name
    before.values[bias] = before.values[bias].abs()
    before.program.facts["least"] = {bias: float(before.values[bias].min())}
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_gating_top_k": 1}
    (weights, ids), (old_weights, old_ids) = after.run(), before.run()
    torch.testing.assert_close(spread(weights, ids), spread(old_weights, old_ids), rtol=1e-6, atol=0.0)
    after.values[bias] = after.values[bias] - 1  # a checkpoint that was loaded later
    with pytest.raises(RuntimeError, match="has negative entries now"):
        after.run()


def test_refuses_scores_in_bf16() -> None:
    router = Router(bias="none")
    logits = torch.randn((9, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    _, log = trace(router, logits, torch.zeros(16)).fused(RULES)
    assert log.hits == []
    assert any("chosen by torch.bfloat16 scores, the op chooses by fp32 scores" in m.reason for m in log.misses)


def test_refuses_integer_logits() -> None:
    logits = torch.randint(-3, 4, (9, 16), generator=torch.Generator().manual_seed(0))
    _, log = trace(Router(bias="none"), logits, torch.zeros(16)).fused(RULES)
    assert log.hits == []
    assert any("chosen by torch.int64 logits, the op chooses by fp32 logits" in m.reason for m in log.misses)


def test_refuses_logits_of_rank_three() -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ids = scores.topk(4, dim=-1)[1]
        weights = scores.gather(2, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    _, log = trace(route, torch.randn(2, 3, 16)).fused(RULES)
    assert log.hits == []
    assert any("the logits must be [tokens, experts]" in m.reason for m in log.misses)


def test_other_ids_for_the_weights_do_not_match() -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ids = scores.topk(4, dim=-1)[1]
        weights = scores.gather(1, ids)
        other = scores.gather(1, (ids + 1) % 16)
        return weights / (other.sum(-1, keepdim=True) + 1e-20), ids

    _, log = trace(route, torch.randn(3, 16)).fused(RULES)
    assert log.hits == []
    assert any("the same picked" in m.reason for m in log.misses), log.misses


def test_weights_of_the_next_expert_are_told() -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ids = scores.topk(4, dim=-1)[1]
        weights = scores.gather(1, (ids + 1) % 16)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    assert_refused(trace(route, torch.randn(3, 16)), RULES, "found aten.remainder int64[3, 4], aten.add")


def test_other_readers_of_scores_stay() -> None:
    def route(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        weights, ids = Router()(logits, bias)
        return weights, ids, logits.sigmoid(), (ids[..., None] == torch.arange(16)).sum(1)

    inputs = (torch.randn((5, 16), generator=torch.Generator().manual_seed(3)), torch.zeros(16))
    before = trace(route, *inputs)
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_gating_top_k": 1}
    assert "aten.sigmoid.default" in after.operations()
    old, new = before.run(), after.run()
    torch.testing.assert_close(spread(new[0], new[1]), spread(old[0], old[1]), rtol=1e-6, atol=0.0)
    assert torch.equal(new[2], old[2])
    assert torch.equal(new[3], old[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 96), (8, 1)])
def test_fires_on_the_stock_router(dtype: torch.dtype, batch: int, length: int) -> None:
    gate = block(dtype).gate
    x = tokens(batch, length, 64, dtype)
    before = captured(gate, x)
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_gating_top_k": 1}
    (call,) = after.calls(OP)
    assert (call["k_group"], call["group_count"], call["eps"]) == (2, 4, 1e-20)
    (logits, weights, ids), (old_logits, old_weights, old_ids) = after.run(), before.run()
    assert torch.equal(logits, old_logits)
    torch.testing.assert_close(spread(weights, ids), spread(old_weights, old_ids), rtol=1e-6, atol=0.0)
    exact = x.double().reshape(-1, 64) @ gate.weight.double().T
    dense, _ = Router().exact(exact.detach(), gate.e_score_correction_bias)
    torch.testing.assert_close(spread(weights, ids).double(), dense, rtol=2e-6, atol=1e-12)


def _values(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    values, ids = logits.topk(4, dim=-1)
    return values.softmax(dim=-1), ids


def _gathered(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    ids = (logits + bias).topk(4, dim=-1)[1]
    return (logits.gather(1, ids) * 0.5).softmax(dim=-1), ids


def _sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    values, ids = logits.topk(4, dim=-1)
    return values.sigmoid().bfloat16(), ids


def _times(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = logits.softmax(dim=-1)
    ids = (scores * bias.exp()).topk(4, dim=-1)[1]
    return scores.gather(1, ids), ids


@pytest.mark.parametrize(("route", "node", "reason"), [
    (_values, "aten._softmax", "aten._softmax is taken of the chosen logits"),
    (_gathered, "aten._softmax", "aten._softmax is taken of the chosen logits"),
    (_sigmoid, "aten.sigmoid", "aten.sigmoid is taken of the chosen logits"),
    (_times, "aten.mul", "the experts are chosen by aten.mul float32[20, 16]"),
])
def test_scores_and_choice_in_another_order_are_told_of(route: Any, node: str, reason: str) -> None:
    generator = torch.Generator().manual_seed(0)
    before = trace(route, torch.randn((20, 16), generator=generator), torch.randn(16, generator=generator))
    assert_refused(before, RULES, reason)
    (miss,) = before.fused(RULES)[1].misses
    (named,) = [n for n in before.program.gm.graph.nodes if n.name == miss.node]
    assert short(named.target) == node
