"""Routed experts over dies: every rank's tokens come out as on one die, and what is not such experts is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu  # noqa: F401  (registers the npu ops)

from cannopy.backend.host import target as host_target
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.parallel import legality, stage
from cannopy.fusion_rules.parallel.experts import EXPERTS, Spread
from cannopy.fx_passes.parallel import LAYOUT, Layout, Parallel, ParallelError
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.verifier import Verifier
from tests.parallel import lockstep, lockstep_experts
from tests.rules import test_moe_experts as sorted_experts
from tests.rules.moe_support import Traced, trace

Tensor = torch.Tensor
Model = Callable[..., Any]
npu = torch.ops.npu
T, H, E, K, INNER = 5, 1024, 8, 3, 32
DISPATCH = "npu.npu_moe_distribute_dispatch_v2.default"


def moe(x: Tensor, gate_up: Tensor, down: Tensor, *, choices: int = E, skip: bool = False, share: bool = False,
        act: Callable[[Tensor], Tensor] = npu.npu_swiglu, mix: Callable[..., Any] | None = None) -> Any:
    """Experts as the fusion writes them. The first columns of x are the router's scores; ``mix`` adds an output."""
    scores, ids = x[:, :choices].float().softmax(-1).topk(K)
    sent = npu.npu_moe_init_routing_v2(
        x, ids.int(), active_num=x.shape[0] * K, expert_num=choices, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, gate_up.shape[0]], row_idx_type=0)
    rows, row_of_pair, counts, _ = sent

    def grouped(a: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = npu.npu_grouped_matmul([a], [weight], group_list=counts, split_item=3, group_type=0,
                                               group_list_type=1)[0]
        return found

    up = grouped(rows, gate_up)
    hidden = act(up)
    out = grouped(hidden, down)
    dropped = choices > gate_up.shape[0]
    skips: list[Tensor | None] = [None, None]
    if share:
        zero = scores.masked_fill(ids.int() < gate_up.shape[0], 0.0)
        skips[0] = (x.float() * zero.sum(-1, keepdim=True)).to(x.dtype)
    if skip:
        skips[share] = torch.tanh(x)
    y = npu.npu_moe_finalize_routing(out.reshape(K, -1, H) if dropped else out, *skips, None, scores, row_of_pair, None,
                                     drop_pad_mode=3 if dropped else 2)
    return y if mix is None else (y, mix(rows=rows, counts=counts, up=up, hidden=hidden, out=out, pairs=row_of_pair))


def plain(x: Tensor, gate_up: Tensor, down: Tensor) -> Any:
    return moe(x, gate_up, down)


def parameters(experts: int = E) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = ((experts, H, 2 * INNER), (experts, INNER, H))
    return [(torch.randn(size, generator=g) / size[1] ** 0.5).bfloat16() for size in sizes]


def even(rank: int) -> Tensor:
    """Scores at random."""
    return torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).bfloat16()


def one_expert(rank: int) -> Tensor:
    """All tokens of all ranks choose expert 5 first, and the last two experts are chosen by nobody."""
    x = even(rank)
    x[:, 5], x[:, E - 2 : E] = 9.0, -9.0
    return x


def one_die(rank: int) -> Tensor:
    """All tokens of all ranks choose the first K experts."""
    x = even(rank)
    x[:, :K] += 20.0
    return x


def padding(rank: int) -> Tensor:
    """Rank 1 has nothing but padding: tokens of zeros, as a graph with static shapes carries them."""
    return torch.zeros(T, H).bfloat16() if rank == 1 else even(rank)


def cut(program: Program, parallel: str, rank: int, target: str = "atlas-a3", way: str = "auto",
        log: Log | None = None) -> Program:
    found = copy.deepcopy(program)
    found.facts[LAYOUT] = Layout(Parallel.parse(parallel), rank)
    verifier = Verifier(found)
    stage.run(found, target, way, log)
    verifier.verify(found)
    return found


def traced(fn: Model, x: Tensor, weights: Sequence[Tensor]) -> Traced:
    dialect.register_all()
    return trace(fn, x, *weights, parameters=range(1, len(weights) + 1))


def check(fn: Model, parallel: str, make: Callable[[int], Tensor], way: str, weights: Sequence[Tensor] | None = None,
          target: str = "atlas-a3", roundings: int = 0) -> list[Program]:
    """All ranks next to one die: equal within a step of bfloat16 (products of other numbers of rows add in another
    order), and one more for each of ``roundings``."""
    whole = traced(fn, make(0), weights or parameters())
    layout = Parallel.parse(parallel)
    programs = [cut(whole.program, parallel, rank, target, way) for rank in range(layout.dies)]
    name = whole.program.inputs[0].name
    values = [{**whole.values, name: make(rank // layout.attn_tp)} for rank in range(layout.dies)]
    for rank, own in zip(lockstep.run(programs, values, lockstep_experts.joint(target)), values, strict=True):
        (single,) = Traced(copy.deepcopy(whole.program), own).run()
        (ours,) = rank.outputs
        error = (ours.double() - single.double()).abs()
        worst = float((error - (1 + roundings) * 2.0**-7 * single.double().abs()).max())
        assert worst <= 2.0**-8, worst
    return programs


def calls(program: Program, name: str) -> int:
    return sum(str(n.target) == name for n in program.gm.graph.nodes)


@pytest.mark.parametrize("way", ["dispatch", "routing"])
@pytest.mark.parametrize("make", [even, one_expert, one_die, padding], ids=lambda f: f.__name__)
@pytest.mark.parametrize("parallel", ["ep=2,dp=4", "ep=8,dp=8"])
def test_uneven_routing(parallel: str, make: Callable[[int], Tensor], way: str) -> None:
    for program in check(plain, parallel, make, way):
        assert calls(program, DISPATCH) == (way == "dispatch")
        assert lockstep.collectives(program) == ({"all_to_all_single ep_routed": 3} if way == "routing" else {})


@pytest.mark.parametrize("way", ["dispatch", "routing"])
@pytest.mark.parametrize(("share", "skip"), [(False, True), (True, False), (True, True), (False, False)])
def test_zero_experts_and_what_is_added(share: bool, skip: bool, way: str) -> None:
    def model(x: Tensor, *w: Tensor) -> Tensor:
        return moe(x, *w, choices=E + 4, share=share, skip=skip)  # type: ignore[no-any-return]

    for program in check(model, "ep=4,dp=4", even, way, roundings=2):
        for node in program.gm.graph.nodes:
            if str(node.target) == DISPATCH:
                assert node.kwargs.get("copy_expert_num", 0) == 4 * share
                assert node.kwargs.get("zero_expert_num", 0) == 4 * (not share)


@pytest.mark.parametrize("way", ["dispatch", "routing"])
@pytest.mark.parametrize("tokens", [4, 5])
def test_dies_with_the_same_tokens_send_a_part_each(tokens: int, way: str) -> None:
    whole = traced(plain, even(0)[:tokens], parameters())
    parallel = "ep=4,dp=2,attn_tp=2"
    with pytest.raises(ParallelError, match="attn_tp=2 finds nothing to cut"):  # there is no attention here
        cut(whole.program, parallel, 0, way=way)
    steps = dict(stage.steps())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "steps", lambda: {"ep": steps["ep"]})
        for program in check(plain, parallel, lambda rank: even(rank)[:tokens], way):
            (spread,) = program.facts[EXPERTS]
            assert (spread.traffic.tokens, spread.repeated) == ((2, 1) if tokens == 4 else (5, 2))
            assert ("all_gather_into_tensor attn_tp" in lockstep.collectives(program)) == (tokens == 4)


def test_weights_are_parts_of_the_parameters() -> None:
    program = cut(traced(plain, even(0), parameters()).program, "ep=4,dp=4", 3)
    assert [(e.recipe, len(e.sources)) for e in program.weights] == [("w[0][6:8]", 1)] * 2


def test_chunks_when_a_buffer_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legality, "ROUTED_BYTES", 2 * 2 * 3 * H * 2)  # two tokens: 2 dies, 3 rows for each
    for program in check(plain, "ep=2,dp=2", one_die, "routing"):
        (spread,) = program.facts[EXPERTS]
        assert list(spread.chunks) == [2, 2, 1]
        assert lockstep.collectives(program) == {"all_to_all_single ep_routed": 9}
    monkeypatch.setattr(legality, "MOST_CHUNKS", 2)
    with pytest.raises(ParallelError, match=r"2 dies · 3 rows · 1024 features · 2 bytes = 12288 bytes per token"):
        check(plain, "ep=2,dp=2", even, "routing")


def test_a2_hands_the_weights_on() -> None:
    with host_target.using("atlas-a2"):
        for program in check(plain, "ep=2,dp=2", even, "dispatch", target="atlas-a2"):
            (sent,) = (n for n in program.gm.graph.nodes if str(n.target) == DISPATCH)
            assert sent.kwargs["group_tp"] == sent.args[2]
            assert sent.kwargs["comm_alg"] == "fullmesh"


def spread(fn: Model, x: Tensor, **given: Any) -> Spread:
    (found,) = cut(traced(fn, x, parameters()).program, "ep=4,dp=4", 0, **given).facts[EXPERTS]
    assert isinstance(found, Spread)
    return found


def test_routing_where_dispatch_does_not_reach() -> None:
    many = even(0).repeat(103, 1)
    found = spread(plain, many)
    assert found.way == "routing"
    assert "BS is at most 512, found BS = 515" in found.why
    assert spread(plain, even(0), target="atlas-950").way == "routing"
    with pytest.raises(ParallelError, match=r"experts=dispatch cannot be: .*BS is at most 512"):
        spread(plain, many, way="dispatch")
    with pytest.raises(ParallelError, match="choose an expert twice"):
        spread(moe_of_ids, even(0), way="dispatch")
    assert spread(moe_of_ids, even(0)).routed_bytes == 4 * K * T * H * 2  # K rows, not 2


def moe_of_ids(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Nothing says that a token's experts differ."""
    ids = x[:, :K].abs().clamp(max=E - 1).int()
    rows, pairs, counts, _ = npu.npu_moe_init_routing_v2(
        x, ids, active_num=x.shape[0] * K, expert_num=E, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        quant_mode=-1, active_expert_range=[0, E], row_idx_type=0)
    kw = {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": 1}
    hidden = npu.npu_swiglu(npu.npu_grouped_matmul([rows], [gate_up], **kw)[0])
    out = npu.npu_grouped_matmul([hidden], [down], **kw)[0]
    scores = x[:, K : 2 * K].float()
    found: Tensor = npu.npu_moe_finalize_routing(out, None, None, None, scores, pairs, None, drop_pad_mode=2)
    return found


def test_tokens_that_choose_an_expert_twice() -> None:
    check(moe_of_ids, "ep=4,dp=4", lambda rank: torch.zeros(T, H).bfloat16() + rank % 3, "auto")


def other(**given: Any) -> Model:
    return lambda x, *w: moe(x, *w, **given)


def half_gelu(up: Tensor) -> Tensor:
    return F.gelu(up[:, :INNER]) * up[:, INNER:]


REFUSED: list[tuple[str, Model, str]] = [
    ("another activation", other(act=half_gelu), r"npu_swiglu is expected before npu\.npu_grouped_matmul"),
    ("a step behind the activation", other(act=lambda u: npu.npu_swiglu(u) * 2.0), "npu_swiglu is expected"),
    ("the other half first", other(act=lambda u: npu.npu_swiglu(u.t(), 0).t()), "npu_swiglu is expected"),
    *[(f"another reader of {name}", other(mix=lambda name=name, **v: v[name].sum()), "reads .* inside of the experts")
      for name in ("rows", "counts", "up", "hidden", "out", "pairs")],
]


@pytest.mark.parametrize(("fn", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_not_such_experts_is_refused(fn: Model, words: str) -> None:
    with pytest.raises(ParallelError, match=words):
        cut(traced(fn, even(0), parameters()).program, "ep=2,dp=2", 0)


def changed(target: str, **given: Any) -> Program:
    """The experts with other arguments of one kernel."""
    program = traced(plain, even(0), parameters()).program
    node = next(n for n in program.gm.graph.nodes if target in str(n.target))
    names = [a.name for a in node.target._schema.arguments]
    for name, value in given.items():
        if name in node.kwargs or names.index(name) >= len(node.args):
            node.kwargs = {**node.kwargs, name: value}
        else:
            node.args = tuple(value if i == names.index(name) else a for i, a in enumerate(node.args))
    return program


@pytest.mark.parametrize(("target", "given", "words"), [
    ("init_routing", {"active_num": T}, r"active_num of .* must be 15, found 5"),
    ("init_routing", {"expert_tokens_num_type": 0}, "expert_tokens_num_type"),
    ("init_routing", {"active_expert_range": [2, 6]}, "active_expert_range"),
    ("init_routing", {"quant_mode": 1}, "quant_mode of .* must be -1, found 1"),
    ("init_routing", {"drop_pad_mode": 1, "expert_capacity": 2}, "drop_pad_mode|expert_capacity"),
    ("init_routing", {"row_idx_type": 1}, "row_idx_type"),
    ("grouped_matmul", {"group_list_type": 0}, "group_list_type"),
    ("grouped_matmul", {"act_type": 1}, "act_type"),
    ("swiglu", {"dim": 0}, "dim of npu.npu_swiglu.default must be -1"),
    ("finalize", {"drop_pad_mode": 1}, "drop_pad_mode 1 leaves out pairs"),
    ("finalize", {"drop_pad_mode": 0}, "drop_pad_mode 0"),
    ("finalize", {"drop_pad_mode": 3}, "drop_pad_mode 3 does not fit 8 choices of 8 experts"),
    ("finalize", {"scales": None}, "one weight per pair"),
])
def test_other_arguments_are_refused(target: str, given: dict[str, Any], words: str) -> None:
    for kind in ("ep", "moe_tp"):
        with pytest.raises(ParallelError, match=rf"^{kind}=2: .*({words})"):
            cut(changed(target, **given), f"{kind}=2,dp=2", 0)


def test_bias_and_computed_weights_are_refused() -> None:
    def biased(x: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        return moe(x, gate_up * 2, down)

    with pytest.raises(ParallelError, match="weights of the experts must be parameters"):
        cut(traced(biased, even(0), parameters()).program, "ep=2,dp=2", 0)
    program = changed("grouped_matmul")
    node = next(n for n in program.gm.graph.nodes if "grouped_matmul" in str(n.target))
    node.kwargs = {**node.kwargs, "bias": [node.args[1][0]]}
    with pytest.raises(ParallelError, match=r"bias of npu\.npu_grouped_matmul\.default must be None"):
        cut(program, "ep=2,dp=2", 0)


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(ParallelError, match="8 / 3 is no whole number"):
        cut(traced(plain, even(0), parameters()).program, "ep=3,dp=3", 0)


def test_a_way_for_experts_that_are_not_spread() -> None:
    with pytest.raises(ParallelError, match="experts=routing is asked for, but dp=2 spreads no experts"):
        cut(traced(plain, even(0), parameters()).program, "dp=2", 0, way="routing")


def test_experts_that_are_in_no_kernel_are_not_left_whole() -> None:
    def loose(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        scores, ids, _ = npu.npu_moe_gating_top_k(x[:, :16].float(), K)
        up = torch.einsum("th,tkhi->tki", x, gate_up[ids.long()])
        out: Tensor = torch.einsum("tki,tkih,tk->th", F.gelu(up), down[ids.long()], scores.bfloat16())
        return out

    weights = [torch.randn(16, H, INNER).bfloat16(), torch.randn(16, INNER, H).bfloat16()]
    for kind in ("ep", "moe_tp"):
        with pytest.raises(ParallelError, match=rf"^{kind}=2: .*chooses are in no kernel.* is it switched off"):
            cut(traced(loose, even(0), weights).program, f"{kind}=2,dp=2", 0)


def test_the_reason_of_the_fusion_is_told() -> None:
    """Experts with another activation stay what they were; asked to spread them, the compiler says what stopped it."""
    def gelu(up: Tensor) -> Tensor:
        return F.gelu(up[:, : sorted_experts.MID]) * up[:, sorted_experts.MID :]

    left, log = sorted_experts.traced(sorted_experts.Experts(act=gelu)).fused(sorted_experts.RULES)
    with pytest.raises(ParallelError, match=r"_grouped_mm.* is not part of .*the fusion moe_experts did not apply: .*"):
        cut(left.program, "ep=2,dp=2", 0, log=log)
