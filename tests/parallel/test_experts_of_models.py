"""Routed experts of small models on all dies against eager, and what each layer then has."""

from __future__ import annotations

import copy

import pytest

from cannopy.fusion_rules.parallel import stage
from cannopy.fusion_rules.parallel.experts import EXPERTS
from cannopy.fx_passes.parallel import LAYOUT, Layout, Parallel
from cannopy.fx_passes.program import Program
from tests.parallel import lockstep, lockstep_experts, ranks

R1 = {"num_hidden_layers": 2}
DISPATCH, COMBINE, GROUPED = (f"npu.npu_{name}.default" for name in (
    "moe_distribute_dispatch_v2", "moe_distribute_combine_v2", "grouped_matmul"))


def counts(program: Program) -> list[int]:
    called = [str(n.target) for n in program.gm.graph.nodes]
    return [called.count(name) for name in (DISPATCH, COMBINE, GROUPED)]


@pytest.mark.parametrize("parallel", ["ep=4,dp=2,attn_tp=2", "ep=2,dp=2,dense_tp=2"])
def test_deepseek_r1(parallel: str) -> None:
    """One dense layer and one with experts."""
    case = ranks.serving("deepseek-r1", **R1)
    for report in ranks.check(case, parallel, lockstep_experts.joint()):
        assert report.passed, report.failures
    assert counts(ranks.cut(case.program, parallel, 1)) == [1, 1, 2]


def test_longcat_hands_tokens_on_in_combine() -> None:
    """Its zero experts are copies: nothing of their share is computed any more."""
    case = ranks.serving("longcat-flash", num_layers=1)
    for report in ranks.check(case, "ep=2,dp=2", lockstep_experts.joint()):
        assert report.passed, report.failures
    program = ranks.cut(case.program, "ep=2,dp=2", 1)
    assert counts(program) == [1, 1, 2]
    (combine,) = (n for n in program.gm.graph.nodes if str(n.target) == COMBINE)
    assert combine.kwargs["copy_expert_num"] == 4
    assert not any("masked_fill" in str(n.target) for n in program.gm.graph.nodes)


def test_weights_of_a_die_are_its_share_to_the_byte() -> None:
    """Of each stack of experts a die reads the bytes of its own, as one slice of the parameter."""
    case = ranks.serving("deepseek-r1", **R1)
    config = case.model.config
    for rank in range(4):
        program = ranks.cut(case.program, "ep=4,dp=4", rank)
        parts = {e.sources[0].rpartition("_experts_")[2]: e.recipe for e in program.weights if "w[0][" in e.recipe
                 and "experts" in e.sources[0]}
        each = config.n_routed_experts // 4
        assert parts == dict.fromkeys(("gate_up_proj", "down_proj"), f"w[0][{rank * each}:{(rank + 1) * each}]")
        stacks = (n for n in program.gm.graph.nodes if n.op == "placeholder" and n.users and "experts_" in n.name)
        sizes = [n.meta["val"].numel() for n in stacks if n.name.endswith("part")]
        width = config.hidden_size * config.moe_intermediate_size
        assert sorted(sizes) == [each * width, each * 2 * width]


def test_routed_twice_without_dispatch() -> None:
    case = ranks.serving("deepseek-r1", **R1)
    program = copy.deepcopy(case.program)
    program.facts[LAYOUT] = Layout(Parallel.parse("ep=4,dp=4"), 2)
    stage.run(program, "atlas-a3", "routing")
    assert lockstep.collectives(program) == {"all_to_all_single ep_routed": 3}
    assert counts(program) == [0, 0, 2]
    (spread,) = program.facts[EXPERTS]
    t = spread.traffic
    assert spread.routed_bytes == 4 * t.tokens * min(t.top_k, t.experts // 4) * t.hidden * 2
