"""Experts without weights, which hand their token on: the formula, the ways to write it, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cannopy.frontend.experts import capturable
from cannopy.fusion_rules.parallel.mixtures import _is_share
from cannopy.fusion_rules.rewrite import moe_experts, moe_experts_batched, moe_gating_top_k, swiglu
from cannopy.fx_passes.graph import Editor
from cannopy.models.lively import lively_
from cannopy.models.longcat import LongcatConfig, ShortcutExperts
from tests.rules.moe_support import Tensor, Traced, captured, error, tokens, trace

RULES = (*moe_experts.RULES, *moe_experts_batched.RULES)
EVERY = (*moe_gating_top_k.RULES, *RULES, *swiglu.RULES)
E, ZERO, T, K, H, MID = 5, 3, 9, 3, 32, 16
BF16 = 1.25 * 2.0**-8
"""Relative error of the norm: hidden, product, expert output and result are rounded, each by 2^-9 at most."""


def masked(ids: Tensor, weights: Tensor, bound: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and weights of the experts with weights, and each token's share for the others: masked_fill."""
    zero = ids >= bound
    return ids.masked_fill(zero, 0), weights.masked_fill(zero, 0.0), weights.masked_fill(~zero, 0.0).sum(-1, True)


def chosen(ids: Tensor, weights: Tensor, bound: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """The same with where, and the comparisons the other way round."""
    real = ids < bound
    return torch.where(real, ids, 0), torch.where(real, weights, 0), torch.where(ids > bound - 1, weights, 0).sum(
        1, keepdim=True)


def batched(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows = x[:, None].expand(T, K, H).reshape(T * K, H, 1)
    gate, up = torch.bmm(w1[:E][ids.flatten()], rows)[..., 0].chunk(2, -1)
    out = torch.bmm(w2[ids.flatten()], (F.silu(gate) * up)[..., None])[..., 0]
    return (out.view(T, K, H) * weights[..., None]).sum(1)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    order = ids.flatten().sort()
    ends = torch.histc(order.values.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order.indices // K], w1[:E].transpose(1, 2), ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), ends)
    out = out * weights.flatten()[order.indices, None]
    return out[order.indices.argsort()].view(T, K, H).sum(1)


class Block:
    """y of x, logits, gate_up and down: the first E of E + ZERO numbers have weights."""

    def __init__(self, mask: Callable[..., Any] = masked, experts: Callable[..., Tensor] = batched,
                 late: bool = True, bound: int = E) -> None:
        self.mask, self.experts, self.late, self.bound = mask, experts, late, bound

    def __call__(self, x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(K, dim=-1)
        ids, weights, share = self.mask(ids, weights * 6.0, self.bound)
        out = self.experts(x, ids, weights, w1, w2)
        if self.late:  # one rounding, as the loops of transformers are replaced
            return (out + x * share).to(x.dtype)
        return out.to(x.dtype) + (x * share).to(x.dtype)


def operands() -> tuple[Tensor, ...]:
    """Tokens with only zero experts (0), with none (1), and mixed; the stack of gate and up is longer than needed."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn((T, E + ZERO), generator=g)
    logits[0, E:] += 20
    logits[1, :E] += 20
    w1 = torch.randn((E + ZERO, 2 * MID, H), generator=g) / H**0.5
    w2 = torch.randn((E, H, MID), generator=g) / MID**0.5
    return torch.randn((T, H), generator=g).bfloat16(), logits, w1.bfloat16(), w2.bfloat16()


def exact(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The formula in float64, pair by pair."""
    weights, ids = logits.double().softmax(-1).topk(K)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(T):
        for weight, expert in zip(6.0 * weights[t], ids[t].tolist(), strict=True):
            if expert >= E:
                out[t] += weight * x[t].double()
                continue
            gate, up = (w1[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (w2[expert].double() @ (F.silu(gate) * up))
    return out


def traced(block: Callable[..., Tensor]) -> Traced:
    return trace(block, *operands(), parameters=[2, 3])


FIRES = {
    "masked, per pair": Block(),
    "masked, rounded apart": Block(late=False),
    "where, per pair": Block(chosen),
    "where, sorted": Block(chosen, grouped),
    "masked, sorted": Block(masked, grouped, late=False),
}


@pytest.mark.parametrize("rules", [EVERY, RULES], ids=["after the router", "alone"])
@pytest.mark.parametrize("name", FIRES)
def test_pairs_of_zero_experts_are_left_out(name: str, rules: tuple[Any, ...]) -> None:
    before = traced(FIRES[name])
    after, log = before.fused(rules)
    assert log.counts()["moe_experts"] == 1
    assert log.misses == []
    (routing,), (finalize,) = after.calls("npu_moe_init_routing_v2"), after.calls("npu_moe_finalize_routing")
    assert (routing["expert_num"], routing["active_expert_range"]) == (E + ZERO, [0, E])
    assert finalize == {"drop_pad_mode": 3}
    assert after.operations().count("aten.add.Tensor") == 0
    assert {e.recipe for e in after.program.weights} == {"w[0][:5].transpose(1, 2)", "w[0].transpose(1, 2)"}
    found, wanted = after.run()[0], exact(*operands())
    assert error(found, wanted) < BF16
    assert error(found, wanted) < 1.25 * error(before.run()[0], wanted)
    for token in (0, 1):
        assert error(found[token], wanted[token]) < BF16


def test_a_token_of_zero_experts_is_itself_times_its_weights() -> None:
    x, logits, w1, w2 = operands()
    logits[0, :E] = -torch.inf
    before = trace(Block(), x, logits, torch.full_like(w1, 1e30), w2, parameters=[2, 3])
    after, _ = before.fused(EVERY)
    assert torch.equal(after.run()[0][0], x[0] * 6.0)


def hidden_number(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """How many numbers there are to choose from cannot be told: they come from a tensor of their own."""
    ids = logits[:, :K].long().abs() % (E + ZERO)
    ids, weights, share = masked(ids, logits[:, :K] * 1.0)
    return batched(x, ids, weights, w1, w2).to(x.dtype) + (x * share).to(x.dtype)


def weighted_twice(ids: Tensor, weights: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of zero experts go to expert 0 and to the token."""
    zero = ids >= bound
    return ids.masked_fill(zero, 0), weights, weights.masked_fill(~zero, 0.0).sum(-1, True)


@pytest.mark.parametrize("block", [
    hidden_number, Block(weighted_twice, late=False), Block(bound=E - 1, late=False),
], ids=["number of choices unknown", "weights not masked", "an expert with weights is masked"])
def test_other_pairs_are_routed_as_the_model_does(block: Callable[..., Tensor]) -> None:
    before = traced(block)
    after, log = before.fused(EVERY)
    assert log.counts()["moe_experts"] == 1
    (routing,), (finalize,) = after.calls("npu_moe_init_routing_v2"), after.calls("npu_moe_finalize_routing")
    assert (routing["expert_num"], routing["active_expert_range"]) == (E, [0, E])
    assert finalize == {"drop_pad_mode": 2}
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-7


def test_something_else_before_the_rounding_is_refused() -> None:
    def sum_of_all(ids: Tensor, weights: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
        return (*masked(ids, weights, bound)[:2], weights.sum(-1, True))

    before = traced(Block(sum_of_all))
    after, log = before.fused(RULES)
    assert log.hits == []
    assert any("is not the share of zero experts" in m.reason for m in log.misses)
    assert after.operations() == before.operations()


def test_a_share_of_other_weights_stays_as_it_is() -> None:
    def halved(ids: Tensor, weights: Tensor, bound: int) -> tuple[Tensor, Tensor, Tensor]:
        return (*masked(ids, weights, bound)[:2], masked(ids, 0.5 * weights, bound)[2])

    before = traced(Block(halved, late=False))
    after, log = before.fused(EVERY)
    assert log.counts()["moe_experts"] == 1
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-7


class Truncated(Block):
    """The share of zero experts is cut to integers before it is added."""

    def __call__(self, x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids = logits.softmax(-1).topk(K, dim=-1)
        ids, weights, share = self.mask(ids, weights * 6.0, self.bound)
        out, share = self.experts(x, ids, weights, w1, w2), (x * share).to(torch.int32)
        return (out + share).to(x.dtype) if self.late else out.to(x.dtype) + share.to(x.dtype)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("experts", [batched, grouped])
def test_a_share_cut_to_integers_is_not_what_zero_experts_hand_on(experts: Callable[..., Tensor], late: bool) -> None:
    before = traced(Truncated(experts=experts, late=late))
    after, log = before.fused(EVERY)
    assert log.counts().get("moe_experts", 0) == (0 if late else 1)
    assert any("is not the share of zero experts" in m.reason for m in log.misses) == late
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-7


@pytest.mark.parametrize(("kind", "share"), [(torch.float32, True), (torch.int32, False), (torch.bool, False)])
def test_parallel_experts_know_the_share_by_its_value(kind: torch.dtype, share: bool) -> None:
    """What the rule wrote, with one cast there and back behind it."""
    program = traced(Block(late=False)).fused(EVERY)[0].program
    (end,) = [n for n in program.gm.graph.nodes if "finalize_routing" in str(n.target)]
    (init,) = [n for n in program.gm.graph.nodes if "init_routing" in str(n.target)]
    scales = end.args[4]
    whole = Editor(program.gm)
    with whole.before(end):
        cast = whole.call(torch.ops.aten._to_copy.default, end.args[1], dtype=kind)
        back = whole.call(torch.ops.aten._to_copy.default, cast, dtype=torch.bfloat16)
    given = (*init.args[:2], scales, E + ZERO, E)
    assert _is_share(end.args[1], *given)
    assert _is_share(back, *given) == share


def test_fires_on_our_longcat() -> None:
    sizes = LongcatConfig(hidden_size=64, expert_ffn_hidden_size=32, n_routed_experts=6, zero_expert_num=3, moe_topk=4)
    module = lively_(ShortcutExperts(sizes).bfloat16(), 0).eval()
    x = tokens(1, 24, 64, torch.bfloat16)[0]
    before = captured(module, x)
    after, log = before.fused(EVERY)
    assert log.counts() == {"moe_gating_top_k": 1, "moe_experts": 1}
    assert after.calls("npu_moe_gating_top_k")[0]["routed_scaling_factor"] == 6.0
    assert after.calls("npu_moe_init_routing_v2")[0]["active_expert_range"] == [0, 6]
    found, plain = after.run()[0], before.run()[0]
    with torch.no_grad():
        wanted = module.double()(x.double())
    assert error(found, wanted) < 1.25 * error(plain, wanted)


@pytest.mark.parametrize("batch", [1, 8])
def test_fires_on_the_stock_longcat(batch: int) -> None:
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

    config = LongcatFlashConfig(hidden_size=64, expert_ffn_hidden_size=32, n_routed_experts=6, zero_expert_num=3,
                                moe_topk=4)
    module = lively_(LongcatFlashMoE(config), 0).bfloat16().eval()
    x = tokens(batch, 8 // batch, 64, torch.bfloat16)
    before = captured(capturable(module).model, x)
    after, log = before.fused(EVERY)
    assert log.counts() == {"moe_gating_top_k": 1, "moe_experts": 1}
    assert after.calls("npu_moe_init_routing_v2")[0]["expert_num"] == 9
    found = after.run()[0]
    with torch.no_grad():
        plain, wanted = module(x), module.double()(x.double())
    assert error(found, wanted) < 1.25 * error(plain, wanted)
