"""Rows of prompts over the dies that cut heads: every rank gives what one die gives and has T / N rows in between."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cannopy import pipeline
from cannopy.frontend import state
from cannopy.frontend.capture import capture
from cannopy.fusion_rules import dialect
from cannopy.fusion_rules.engine.apply import Log
from cannopy.fusion_rules.parallel import stage
from cannopy.fx_passes.graph import is_call, operator_named, shape
from cannopy.fx_passes.manager import PassManager
from cannopy.fx_passes.parallel import LAYOUT, Layout, Parallel, ParallelError
from cannopy.fx_passes.paths import compile_path
from cannopy.fx_passes.program import Program
from cannopy.options import Options
from cannopy.parity.picks import Pick, Recorder
from tests.parallel import compiled, lockstep, lockstep_experts, ranks, world

RAGGED = (3, 17, 4)
"""24 tokens; prompts begin and end within the rows of a rank."""
LIMIT = 1.5e-2
"""Partial sums over ranks are bfloat16: 1.5 times eager's own error of 1e-2."""
CACHE = 4e-3
"""The rows that a prompt has written, in caches that are otherwise as they were."""
R1, LONGCAT = ("deepseek-r1", {"num_hidden_layers": 2}), ("longcat-flash", {"num_layers": 1})
V32 = ("deepseek-v3.2", {"num_hidden_layers": 2, "index_topk": 8})
NORMS = ("npu::npu_rms_norm", "npu::npu_add_rms_norm")

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def error(found: torch.Tensor, single: torch.Tensor) -> float:
    return float((found.double() - single.double()).norm() / single.double().norm())


def assert_like_one_die(found: Sequence[lockstep.Rank], single: lockstep.Rank, same: torch.Tensor) -> None:
    """Results and caches of ranks that were called alike; all of them have the same. ``same``: tokens to compare."""
    of_last = same[torch.tensor(RAGGED).cumsum(0) - 1]
    for rank in found:
        for ours, expected, first in zip(rank.outputs, single.outputs, found[0].outputs, strict=True):
            rows = same if len(ours) == len(same) else of_last
            assert not bool(rows.any()) or error(ours[rows], expected[rows]) < LIMIT
            assert torch.equal(ours, first)
        for name, expected in single.inputs.items():
            assert torch.equal(rank.inputs[name], expected) or error(rank.inputs[name], expected) < CACHE


def compare(case: ranks.Case, parallel: str) -> None:
    """All ranks next to one die, with requests of their own for each group of attn_tp."""
    programs, each = ranks.cuts(case, parallel), Parallel.parse(parallel).attn_tp
    calls = [case.call(rank // each) for rank in range(len(programs))]
    given = [ranks.values(case, program, args) for program, args in zip(programs, calls, strict=True)]
    recorders, alone = [Recorder() for _ in programs], Recorder()
    found = lockstep.run(programs, given, lockstep_experts.joint(), recorders)
    for first in range(0, len(programs), each):
        alone.picks.clear()
        (single,) = lockstep.run([case.program], [ranks.values(case, case.program, calls[first])], modes=[alone])
        group = slice(first, first + each)
        assert_like_one_die(found[group], single, alike([r.picks for r in recorders[group]], alone.picks))


def alike(found: Sequence[Sequence[Pick]], single: Sequence[Pick]) -> torch.Tensor:
    """The tokens for which routers and indexers have picked as on one die; all but a few, whose scores tie. A router of
    a rank sees its rows, an indexer all."""
    same = torch.ones(sum(RAGGED), dtype=torch.bool)
    for whole, *parts in zip(single, *found, strict=True):
        mine = torch.cat([p.indices for p in parts]) if whole.kind == "experts" else parts[0].indices
        mine, theirs = (x.reshape(len(same), -1).sort(-1).values for x in (mine, whole.indices))
        same &= (mine == theirs).all(-1)
    assert int(same.sum()) * 4 >= len(same) * 3, "more than a quarter of the tokens have other picks"
    return same


def rows_of_norms(program: Program, width: int) -> set[int]:
    """The numbers of rows that norms of the residual stream have."""
    norms = [n for n in program.gm.graph.nodes if is_call(n, *map(operator_named, NORMS))]
    return {shape(n.args[0])[0] for n in norms if shape(n.args[0])[-1] == width}


CASES = [
    (R1, "attn_tp=4,sp=4,dense_tp=4,ep=4", {
        f"{GATHER} attn_tp": 2 * 2 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 1, f"{SCATTER} dense_tp": 1}),
    (R1, "attn_tp=2,sp=2,dense_tp=2,moe_tp=2,embed_tp=2,lm_head_tp=2", {
        f"{GATHER} attn_tp": 2 * 2 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 1, f"{SCATTER} dense_tp": 1,
        f"{GATHER} moe_tp": 3, f"{SCATTER} moe_tp": 1, f"{SCATTER} embed_tp": 1, f"{GATHER} lm_head_tp": 1}),
    (R1, "attn_tp=4,sp=4,dense_tp=2,ep=2,embed_tp=2", {
        f"{GATHER} attn_tp": 2 * 2 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 1, f"{SCATTER} dense_tp": 1,
        f"{SCATTER} embed_tp": 1}),
    (R1, "attn_tp=2,sp=2,dp=2,dense_tp=4,ep=4,embed_tp=4", {
        f"{GATHER} attn_tp": 2 * 2 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 1, f"{SCATTER} dense_tp": 1,
        f"{GATHER} embed_tp": 1, f"{SCATTER} embed_tp": 1}),
    (LONGCAT, "attn_tp=4,sp=4,dense_tp=4,ep=4", {
        f"{GATHER} attn_tp": 2 * 2 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 2, f"{SCATTER} dense_tp": 2}),
    (V32, "attn_tp=4,sp=4,dense_tp=4,ep=4", {
        f"{GATHER} attn_tp": 2 * 3 + 1, f"{SCATTER} attn_tp": 2, f"{GATHER} dense_tp": 1, f"{SCATTER} dense_tp": 1}),
]
"""Latents of queries and keys (V3.2: rows for the prolog, keys and weights of the indexer), and the hidden states."""


@pytest.mark.parametrize(("model", "parallel", "collectives"), CASES, ids=[f"{m[0]} {p}" for m, p, _ in CASES])
def test_prompts(model: tuple[str, dict[str, int]], parallel: str, collectives: dict[str, int]) -> None:
    """No all-reduce is left, the residual stream has the rows of a rank; groups of other sizes inside and across."""
    case = ranks.serving(model[0], "prefill", RAGGED, **model[1])
    program = ranks.cut(case.program, parallel, 1)
    assert lockstep.collectives(program) == collectives
    assert rows_of_norms(program, 1024) == {sum(RAGGED) // Parallel.parse(parallel).sp}
    compare(case, parallel)


def test_heads_alone_add_up_to_the_same() -> None:
    """Without other cuts only the place of a rounding could differ, and it does not: sums are scattered as they are."""
    case = ranks.serving(R1[0], "prefill", RAGGED, **R1[1])
    args, found = case.call(0), []
    for parallel in ("attn_tp=2", "attn_tp=2,sp=2"):
        programs = ranks.cuts(case, parallel)
        found.append(lockstep.run(programs, [ranks.values(case, program, args) for program in programs])[1])
    for ours, expected in zip(found[1].outputs, found[0].outputs, strict=True):
        assert error(ours, expected) < 2e-3  # only products of another number of rows may round otherwise


def changed(case: ranks.Case) -> ranks.Case:
    """Every hidden state is a result as well, one of them twice, and the last matrix is that of the embedding."""
    program = copy.deepcopy(case.program)
    graph = program.gm.graph
    added = [n for n in graph.nodes if is_call(n, operator_named("npu::npu_add_rms_norm"))]
    states = [next(u for u in n.users if u.args[1] == 2) for n in added if any(u.args[1] == 2 for u in n.users)]
    (embedding,) = (n for n in graph.nodes if is_call(n, torch.ops.aten.embedding.default))
    end = next(reversed(graph.nodes))
    end.args = ((*end.args[0], embedding, *states, states[0]),)
    head = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "self_lm_head_weight")
    head.replace_all_uses_with(embedding.args[0])
    return dataclasses.replace(case, program=program)


def test_other_readers() -> None:
    case = changed(ranks.serving(R1[0], "prefill", RAGGED, **R1[1]))
    parallel = "attn_tp=4,sp=4,dense_tp=4,embed_tp=4,lm_head_tp=4"
    program = ranks.cut(case.program, parallel, 3)
    assert lockstep.collectives(program)[f"{GATHER} attn_tp"] == 2 * 2 + 1 + 4
    assert not any("all_reduce" in name for name in lockstep.collectives(program))
    compare(case, parallel)


def test_decode_is_that_of_heads() -> None:
    case = ranks.serving(R1[0], **R1[1])
    programs = []
    for parallel in ("attn_tp=2,sp=2,dense_tp=2", "attn_tp=2,dense_tp=2"):
        program = copy.deepcopy(case.program)
        program.facts[LAYOUT] = Layout(Parallel.parse(parallel), 1)
        stage.run(program, "atlas-a3", decode=True)
        programs.append([(n.name, n.target, str(n.args)) for n in program.gm.graph.nodes])
    assert programs[0] == programs[1]
    made = pipeline.passes(pipeline.plan(Options(phase="decode")), Log())
    assert next(one for one in made if one.name == "parallel").run.keywords["decode"]


def test_refused() -> None:
    for parallel, words in (
        ("attn_tp=4,sp=2", "sp=2 with attn_tp=4: .* which are 4, not 2; give sp=4 or attn_tp=2"),
        ("sp=2", "give sp=1 or attn_tp=2"),
        ("attn_tp=2,sp=2,dp=2,ep=3", "3 dies with requests|4 dies cannot be divided into groups of ep=3"),
    ):
        with pytest.raises(ParallelError, match=words):
            Layout(Parallel.parse(parallel), 0)
    case = ranks.serving(R1[0], "prefill", RAGGED, **R1[1])
    with pytest.raises(ParallelError, match="a prompt is split over all dies, and heads are whole"):
        ranks.cut(case.program, "cp=2,attn_tp=2,sp=2", 0)
    odd = ranks.serving(R1[0], "prefill", (3, 18, 4), **R1[1])
    with pytest.raises(ParallelError, match="sp=2: 25 tokens cannot be divided into 2 parts: 25 / 2 is no whole number;"
                                            " pad the prompt to 26 tokens"):
        ranks.cut(odd.program, "attn_tp=2,sp=2", 0)


def test_stock_model() -> None:
    """DeepSeek-V3.2 of transformers: one row of tokens, [1, T, H]."""
    from tests.rules import support

    model = support.build(num_hidden_layers=2)
    args, kwargs = support.inputs(model, 24)
    state.prepare_state(model, args, kwargs, method="forward")
    program = capture(model, "forward", args, kwargs)
    dialect.register_all()
    passes = pipeline.passes(pipeline.plan(Options()), Log())
    before = next(i for i, one in enumerate(passes) if one.name == "parallel")
    PassManager(passes[:before]).run(program)

    def values(one: Program) -> dict[str, torch.Tensor]:
        found = {s.name: compile_path(s.source)(model, args, kwargs).detach() for s in one.inputs}
        return {s.name: found[s.name] if s.view is None else found[s.name].view(s.view) for s in one.inputs}

    recorders, alone = [Recorder(), Recorder()], Recorder()
    (single,) = lockstep.run([program], [values(program)], modes=[alone])
    parallel = "attn_tp=2,sp=2,dense_tp=2,ep=2"
    programs = [ranks.cut(program, parallel, rank) for rank in range(2)]
    assert not any("all_reduce" in name for name in lockstep.collectives(programs[0]))
    found = lockstep.run(programs, [values(one) for one in programs], lockstep_experts.joint(), recorders)
    same = alike([r.picks for r in recorders], alone.picks)
    for rank in found:
        assert error(rank.outputs[0][0, same], single.outputs[0][0, same]) < LIMIT
        for name, expected in single.inputs.items():
            assert torch.equal(rank.inputs[name], expected) or error(rank.inputs[name], expected) < LIMIT


@pytest.mark.usefixtures("activated")
def test_real_ranks(tmp_path: Path) -> None:
    """Lowered by torchair and run by two processes."""
    case, sizes = ranks.serving(R1[0], "prefill", RAGGED, **R1[1]), Parallel.parse("attn_tp=2,sp=2,dense_tp=2,ep=2")
    expected = compiled.call(compiled.compiled(case, None), case.call(0))

    def work(rank: int) -> dict[str, int]:
        method = compiled.compiled(case, Layout(sizes, rank))
        found = compiled.call(method, case.call(0))
        assert error(found.rows, expected.rows) < LIMIT
        assert all(error(a, b) < CACHE for a, b in zip(found.caches, expected.caches, strict=True))
        ops: dict[str, int] = method.report["ge_ops"]
        return {name: count for name, count in ops.items() if name.startswith("Hcom")}

    assert world.run(sizes.dies, work, tmp_path, seconds=240.0) == [{"HcomAllGather": 6, "HcomReduceScatter": 3}] * 2
