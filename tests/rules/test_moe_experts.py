"""moe_experts: what fires, what is refused and why, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F

from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.rewrite import moe_experts, moe_experts_batched, moe_gating_top_k, swiglu
from tests.features import grouped_mm
from tests.rules.moe_support import Tensor, Traced, assert_refused, block, captured, error, tokens, trace

RULES = (*moe_experts.RULES, *moe_experts_batched.RULES)
EVERY = (*moe_gating_top_k.RULES, *RULES, *swiglu.RULES)
KERNELS = [
    "npu.npu_moe_init_routing_v2.default", "npu.npu_grouped_matmul.default", "npu.npu_swiglu.default",
    "npu.npu_grouped_matmul.default", "npu.npu_moe_finalize_routing.default",
]
E, T, K, H, MID = 6, 5, 3, 32, 16
BOUND = {torch.bfloat16: 1.25 * 2.0**-8, torch.float32: 1e-6}
"""Relative error of the norm. In bf16: hidden, product, expert output and result are rounded, each by 2^-9 at most."""
NOT_WORSE = 1.25
"""Rounding noise of the fused form over that of the captured one, on so few numbers."""


def silu_first(a: Tensor) -> Tensor:
    return F.silu(a[:, :MID]) * a[:, MID:]


@dataclass(frozen=True)
class Experts:
    """Experts in the sorted form, written in plain PyTorch; the defaults are those of transformers."""

    act: Callable[[Tensor], Tensor] = silu_first
    bins: int = E
    low: int = 0
    descending: bool = False
    counted: torch.dtype = torch.float32
    inverse: str = "index_put"
    weights_by: str = "perm"
    token: str = "floor_divide"
    transposed: bool = False
    bias: bool = False
    cast: bool = True
    sum_dim: int = 1

    def __call__(self, x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        sorted_ids, perm = torch.sort(flat, descending=self.descending)
        counts = torch.histc(sorted_ids.to(self.counted), bins=self.bins, min=self.low, max=self.bins - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        token = perm // K if self.token == "floor_divide" else torch.div(perm, K, rounding_mode="floor")
        if not self.transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        hidden = grouped_mm(x[token], w1, ends)
        if self.bias:
            hidden = hidden + 1.0
        out = grouped_mm(self.act(hidden), w2, ends)
        by = {"perm": perm, "ids": sorted_ids, "token": token}[self.weights_by]
        weighted = out * scales.reshape(-1)[by].unsqueeze(-1)
        if self.inverse in ("index_put", "one place"):
            count = perm.numel() if self.inverse == "index_put" else 1
            inverse = torch.empty_like(perm).index_put((perm,), torch.arange(count))
        else:
            inverse = torch.argsort(perm) if self.inverse == "argsort" else perm
        total = weighted if self.inverse == "left out" else weighted[inverse]
        total = total.view(T, K, H).sum(dim=self.sum_dim)
        return total.to(x.dtype) if self.cast else total


def operands(dtype: torch.dtype = torch.bfloat16, transposed: bool = False,
             scales_dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, ids, scales, gate_up, down; one expert gets no token, gate and up differ in scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((T, H), generator=generator)
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])
    scales = torch.rand((T, K), generator=generator) + 0.1
    w1 = torch.randn((E, 2 * MID, H), generator=generator) / H**0.5
    w1[:, :MID] *= 2
    w2 = torch.randn((E, H, MID), generator=generator) / MID**0.5
    if transposed:
        w1, w2 = w1.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return x.to(dtype), ids, scales.to(scales_dtype), w1.to(dtype), w2.to(dtype)


def exact(x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Σ_k scale · down(silu(gate(x)) · up(x)) in float64, pair by pair."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            gate, up = (w1[expert].double() @ x[t].double()).chunk(2)
            out[t] += scales[t, k].double() * (w2[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


def traced(experts: Experts = Experts(), parameters: tuple[int, ...] = (3, 4), **given: object) -> Traced:
    return trace(experts, *operands(transposed=experts.transposed, **given), parameters=parameters)  # type: ignore[arg-type]


FIRES: dict[str, Experts] = {
    "transformers": Experts(),
    "argsort": Experts(inverse="argsort"),
    "div floor": Experts(token="div"),
    "up first in the product": Experts(act=lambda a: a[:, MID:] * F.silu(a[:, :MID])),
    "chunk": Experts(act=lambda a: F.silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1]),
    "weights [E, K, N]": Experts(transposed=True),
}


@pytest.mark.parametrize("rules", [RULES, (*swiglu.RULES, *RULES)], ids=["first", "after swiglu"])
@pytest.mark.parametrize("name", FIRES)
def test_fires_on_exact_forms(name: str, rules: tuple[object, ...]) -> None:
    experts = FIRES[name]
    before = traced(experts)
    after, log = before.fused(rules)  # type: ignore[arg-type]
    assert log.counts()["moe_experts"] == 1
    assert log.misses == []
    assert [o for o in after.operations() if o.startswith("npu.")] == KERNELS
    assert not any("sort" in o or "index" in o or "permute" in o for o in after.operations())
    (routing,), (finalize,) = after.calls("npu_moe_init_routing_v2"), after.calls("npu_moe_finalize_routing")
    assert (routing["active_num"], routing["expert_num"], routing["active_expert_range"]) == (T * K, E, [0, E])
    assert finalize == {"drop_pad_mode": 2}
    assert [e.recipe for e in after.program.weights] == ([] if experts.transposed else ["w[0].transpose(1, 2)"] * 2)
    wanted = exact(*operands())
    assert error(after.run()[0], wanted) < BOUND[torch.bfloat16]
    assert error(after.run()[0], wanted) < NOT_WORSE * error(before.run()[0], wanted)


def test_scales_in_bf16() -> None:
    before = traced(scales_dtype=torch.bfloat16)
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_experts": 1}
    assert error(after.run()[0], exact(*operands(scales_dtype=torch.bfloat16))) < BOUND[torch.bfloat16]


def test_ids_in_int32_are_taken_as_they_are() -> None:
    x, ids, scales, w1, w2 = operands()
    values = (x, ids.int(), scales, w1, w2)
    before = trace(lambda x, i, s, a, b: Experts()(x, i.long(), s, a, b), *values, parameters=[3, 4])
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_experts": 1}
    assert "aten._to_copy.default" not in after.operations()


def test_order_of_gate_and_up() -> None:
    x, ids, scales, w1, w2 = operands()
    w1[:, :MID] = 0
    before = trace(Experts(), x, ids, scales, w1, w2, parameters=[3, 4])
    after, _ = before.fused(RULES)
    assert torch.equal(after.run()[0], torch.zeros_like(x))


def batched(tokens: int = T, more: int = 0, in_turn: bool = False, rank: int = 3, ids_rank: int = 1,
            features: int = 1, narrow: bool = False) -> Traced:
    """Weights gathered per pair; ``in_turn`` repeats all tokens, not each; ``more`` experts of down stay idle.

    ``ids_rank`` 2 looks up ids [T, K], 3 ids [T, K, 1]; a pair has ``features`` weights;
    ``narrow`` rounds the copies of the tokens.
    """
    x, ids, scales, w1, w2 = operands()
    x, ids, scales, w2 = x[:tokens], ids[:tokens], scales[:tokens], torch.cat((w2, w2[:more]))
    ones = (1,) * (rank - 3)
    w1, w2 = w1.view(E, *ones, 2 * MID, H), w2.view(E + more, *ones, H, MID)

    def forward(x: Tensor, i: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
        copies = x.unsqueeze(0 if in_turn else 1).expand(K if in_turn else tokens, tokens if in_turn else K, H)
        copies = copies.to(torch.float8_e4m3fn).to(x.dtype) if narrow else copies
        pairs = ((tokens * K,), (tokens, K), (tokens, K, 1))[ids_rank - 1]
        flat = i.reshape(pairs)
        up = torch.matmul(a[flat], copies.reshape(*pairs, *ones, H, 1)).reshape(tokens * K, 2 * MID)
        out = torch.matmul(b[flat], silu_first(up).reshape(*pairs, *ones, MID, 1)).reshape(tokens * K, H)
        scale = s.unsqueeze(-1).expand(tokens, K, features).reshape(-1, features)
        return (out * scale).view(tokens, K, H).sum(1).to(x.dtype)

    return trace(forward, x, ids, scales, w1, w2, parameters=[3, 4])


@pytest.mark.parametrize("ids_rank", [1, 2])
def test_fires_on_weights_gathered_per_pair(ids_rank: int) -> None:
    before = batched(ids_rank=ids_rank)
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_experts": 1}
    assert error(after.run()[0], exact(*operands())) < BOUND[torch.bfloat16]


def einsum(x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = torch.einsum("tkih,th->tki", w1[ids], x).chunk(2, -1)
    out = torch.einsum("tkhi,tki->tkh", w2[ids], F.silu(gate) * up)
    return (out * scales[..., None]).sum(1).to(x.dtype)


def broadcast(x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (w1[ids] @ x[:, None, :, None])[..., 0].chunk(2, -1)
    out = (w2[ids] @ (F.silu(gate) * up)[..., None])[..., 0]
    return (out * scales[..., None]).sum(1).to(x.dtype)


@pytest.mark.parametrize("rules", [RULES, (*swiglu.RULES, *RULES)], ids=["first", "after swiglu"])
@pytest.mark.parametrize("experts", [einsum, broadcast])
def test_fires_on_weights_gathered_per_token(experts: Callable[..., Tensor], rules: tuple[object, ...]) -> None:
    before = trace(experts, *operands(), parameters=[3, 4])
    after, log = before.fused(rules)  # type: ignore[arg-type]
    assert log.counts()["moe_experts"] == 1
    assert [o for o in after.operations() if o.startswith("npu.")] == KERNELS
    assert error(after.run()[0], exact(*operands())) < BOUND[torch.bfloat16]


def across(x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Tokens and choices swapped: as many of one as of the other."""
    gate, up = (w1[ids] @ x[None, :, :, None])[..., 0].chunk(2, -1)
    out = (w2[ids] @ (F.silu(gate) * up)[..., None])[..., 0]
    return (out * scales[..., None]).sum(1).to(x.dtype)


def quarters(x: Tensor, ids: Tensor, scales: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Each half of the up projection is halved again before SiLU."""
    up = torch.bmm(w1[ids.flatten()], x[:, None].expand(T, K, H).reshape(T * K, H, 1)).reshape(2 * T * K, MID)
    hidden = F.silu(up[:, : MID // 2]) * up[:, MID // 2 :]
    out = torch.bmm(w2[ids.flatten()], hidden.reshape(T * K, MID, 1)).reshape(T * K, H)
    return (out * scales.reshape(-1, 1)).view(T, K, H).sum(1).to(x.dtype)


@pytest.mark.parametrize(("experts", "tokens"), [(across, K), (quarters, T)])
@pytest.mark.parametrize("rules", [RULES, (*swiglu.RULES, *RULES)], ids=["first", "after swiglu"])
def test_refuses_other_products_of_gathered_weights(
    experts: Callable[..., Tensor], tokens: int, rules: tuple[object, ...]
) -> None:
    x, ids, scales, w1, w2 = operands()
    before = trace(experts, x[:tokens], ids[:tokens], scales[:tokens], w1, w2, parameters=[3, 4])
    after, log = before.fused(rules)  # type: ignore[arg-type]
    assert "moe_experts" not in log.counts()
    reason = "expected weights [E, N, K] times one column per pair"
    assert any(reason in m.reason for m in log.misses), [m.reason for m in log.misses]
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-6


REFUSES: dict[str, tuple[Callable[[], Traced], str]] = {
    "swapped halves": (lambda: traced(Experts(act=lambda a: a[:, :MID] * F.silu(a[:, MID:]))), "found the second half"),
    "interleaved": (lambda: traced(Experts(act=lambda a: F.silu(a[:, ::2]) * a[:, 1::2])), "SiLU must be on the first"),
    "gelu": (lambda: traced(Experts(act=lambda a: F.gelu(a[:, :MID]) * a[:, MID:])), "found aten.gelu"),
    "clamp": (lambda: traced(Experts(act=lambda a: F.silu(a[:, :MID].clamp(max=1.0)) * a[:, MID:])),
              "found aten.clamp"),
    "expert bias": (lambda: traced(Experts(bias=True)), "found aten.add"),
    "fewer bins": (lambda: traced(Experts(bins=E, low=1)), "histc counts 6 bins from 1 to 5"),
    "counted in bf16": (lambda: traced(Experts(counted=torch.bfloat16)), "which cannot hold them all"),
    "descending": (lambda: traced(Experts(descending=True)), "must be sorted upwards"),
    "not inverted": (lambda: traced(Experts(inverse="none")), "aten.index_put"),
    "left sorted": (lambda: traced(Experts(inverse="left out")), "expected aten.index, found aten.mul"),
    "weights by id": (lambda: traced(Experts(weights_by="ids")), "expected the same perm"),
    "weights by token": (lambda: traced(Experts(weights_by="token")), "found aten.floor_divide"),
    "sum over tokens": (lambda: trace(
        lambda *a: Experts(sum_dim=0)(*a), *operands(), parameters=[3, 4]),
        "the result must be the sum of [T, K, H] ="),
    "one place for every pair": (lambda: traced(Experts(inverse="one place")),
                                 "the inverse permutation does not cover every pair"),
    "down of more experts": (lambda: batched(more=2), f"{E} experts are counted, the weights have {E + 2}"),
    "copies of all tokens in turn": (lambda: batched(tokens=K, in_turn=True),
                                     "repeated once per chosen expert, side by side"),
    "rounded copies": (lambda: batched(narrow=True),
                       "tokens must be repeated once per chosen expert, the rows are aten._to_copy (a cast"),
    "weights of rank four": (lambda: batched(rank=4), "expected weights [E, N, K] times one column per pair"),
    "ids of three dims": (lambda: batched(ids_rank=3), f"{T * K} pairs of token and expert are not"),
    "one weight per feature": (lambda: batched(features=H), "the weights must be one per pair of token and expert"),
    "weights of other pairs too": (lambda: trace(
        lambda x, i, s, a, b: Experts()(x, i, torch.cat((s, s)), a, b), *operands(), parameters=[3, 4]),
        "the weights must be one per pair of token and expert"),
    "fp32 result": (lambda: traced(Experts(cast=False)), "the result stays torch.float32"),
    "cast to integers before the shared expert": (lambda: trace(
        lambda x, *a: Experts(cast=False)(x, *a).to(torch.int32) + x, *operands(), parameters=[3, 4]),
        "the experts' result is cast to torch.int32"),
    "weights are arguments": (lambda: traced(parameters=()), "must be parameters"),
    "weights are computed": (lambda: trace(
        lambda x, i, s, a, b: Experts()(x, i, s, a + 1, b), *operands(), parameters=[3, 4]), "must be parameters"),
    "weights [E, K, N] are computed": (lambda: trace(
        lambda x, i, s, a, b: Experts(transposed=True)(x, i, s, a + 1, b), *operands(transposed=True),
        parameters=[3, 4]), "expert weights must be parameters [E, N, K] or [E, K, N], found a computed value"),
    "sum read too": (lambda: trace(
        lambda *a: ((r := Experts(cast=False)(*a)).bfloat16(), r + 1), *operands(), parameters=[3, 4]),
        "the experts' result has other readers"),
    "half of the pairs": (lambda: trace(
        lambda x, i, s, a, b: Experts()(x.repeat(2, 1), i, s, a, b), *operands(), parameters=[3, 4]),
        "pairs of token and expert are not"),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, reason = REFUSES[name]
    assert_refused(make(), RULES, reason)


@pytest.mark.parametrize(("cut", "fires"), [
    (lambda a: a[:E], True), (lambda a: a[2:], False), (lambda a: a[:: (E + 2) // E][:E], True),
], ids=["the first", "the last", "the first again"])
def test_some_rows_of_a_longer_stack(cut: Callable[[Tensor], Tensor], fires: bool) -> None:
    x, ids, scales, w1, w2 = operands()
    more = torch.cat([w1, w1[:2] + 1])
    before = trace(lambda x, i, s, a, b: Experts()(x, i, s, cut(a), b), x, ids, scales, more, w2, parameters=[3, 4])
    after, log = before.fused(RULES)
    assert bool(log.hits) is fires
    assert fires or any("must be parameters" in m.reason for m in log.misses)
    assert error(after.run()[0], before.run()[0].double()) < 2.0**-7


def test_refuses_other_targets_limits() -> None:
    """fp32 scales go with bf16 rows, not with fp16 rows on A3; the 950 takes both."""
    x, ids, scales, w1, w2 = operands()

    def half(x: Tensor, i: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
        picked = x.unsqueeze(1).expand(T, K, H).reshape(T * K, H, 1)
        flat = i.reshape(-1)
        out = torch.bmm(b[flat], silu_first(torch.bmm(a[flat], picked).squeeze(-1)).unsqueeze(-1)).squeeze(-1)
        return (out * s.reshape(-1, 1)).view(T, K, H).sum(1).to(x.dtype)

    before = trace(half, x.half(), ids, scales, w1.half(), w2.half(), parameters=[3, 4])
    _, log = before.fused(RULES)
    assert log.hits == []
    assert any("[clause scales-dtype" in m.reason for m in log.misses)
    _, log = before.fused(RULES, target="atlas-950")
    assert log.counts() == {"moe_experts": 1}


def shared(body: Callable[..., object]) -> Traced:
    """``body(routed, y)`` where routed is the experts' result and y a tensor of its shape."""
    y = torch.randn((T, H), generator=torch.Generator().manual_seed(9)).bfloat16()
    return trace(lambda y, *a: body(Experts()(*a), y), y, *operands(), parameters=[4, 5])


@pytest.mark.parametrize("name", ["routed + y", "y + routed"])
def test_takes_the_shared_expert(name: str) -> None:
    before = shared((lambda r, y: r + y.neg()) if name == "routed + y" else (lambda r, y: y.neg() + r))
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_experts": 1}
    assert "aten.add.Tensor" not in after.operations()
    y, *rest = before.values.values()
    wanted = exact(*rest) - y.double()
    assert error(after.run()[0], wanted) < BOUND[torch.bfloat16]
    assert error(after.run()[0], wanted) < error(before.run()[0], wanted)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda r, y: (r + (s := y.neg()), s), "what is added to the experts' result has other readers"),
        (lambda r, y: r + y.float(), "is torch.float32, not torch.bfloat16: added separately"),
        (lambda r, y: r + y[:1].neg(), "not a tensor of its shape"),
        (lambda r, y: (r + y.neg(), r * 2), ""),
    ],
    ids=["y read too", "fp32", "broadcast", "routed read too"],
)
def test_leaves_other_additions(body: Callable[..., object], reason: str) -> None:
    before = shared(body)
    after, log = before.fused(RULES)
    assert log.counts() == {"moe_experts": 1}
    assert "aten.add.Tensor" in after.operations()
    assert not reason or any(reason in m.reason for m in log.misses), log.misses
    for new, old in zip(after.run(), before.run(), strict=True):
        assert error(new, old.double()) < 2.0**-7


def test_the_residual_is_left_to_the_norm() -> None:
    dialect.register_all()
    norm = torch.ops.cannopy.rms_norm.default
    before = shared(lambda r, y: (norm(r + (s := y.neg()), y[0], 1e-6), s))
    (miss,) = before.fused(RULES)[1].misses
    assert "add_rms_norm" in miss.remedy


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 96), (8, 1)])
def test_fires_on_the_stock_block(experts: str, dtype: torch.dtype, batch: int, length: int) -> None:
    module = block(dtype, experts)
    x = tokens(batch, length, 64, dtype)
    before = captured(module, x)
    after, log = before.fused(EVERY)
    assert log.counts() == {"moe_gating_top_k": 1, "moe_experts": 1, "swiglu": 1}
    assert log.misses == []
    assert "aten._to_copy.default" not in after.operations() or dtype == torch.bfloat16
    assert not any(o.startswith("aten.") and o.split(".")[1] not in ("_to_copy", "linear", "reshape")
                   for o in after.operations())
    flat = x.reshape(-1, 64)
    with torch.no_grad():
        _, scales, ids = module.gate(x)
    parts = {k: v.double() for k, v in module.state_dict().items()}
    wide = flat.double()
    gate, up = (wide @ parts[f"shared_experts.{k}_proj.weight"].T for k in ("gate", "up"))
    routed = exact(flat, ids, scales, parts["experts.gate_up_proj"], parts["experts.down_proj"])
    wanted = routed + (F.silu(gate) * up) @ parts["shared_experts.down_proj.weight"].T
    found = after.run()[0].reshape(-1, 64)
    assert error(found, wanted) < BOUND[dtype]
    assert error(found, wanted) < NOT_WORSE * error(before.run()[0].reshape(-1, 64), wanted) + 1e-8
