"""Sparse MLA, the MLA prolog, norms and rotary on the graph of a stock DeepSeek-V3.2 layer and on mutants of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.fusion_rules import catalog
from cannopy.fusion_rules.rewrite import mla_prolog, sparse_flash_attention
from cannopy.fx_passes.graph import Editor, aten, shape
from cannopy.fx_passes.program import Program
from tests.rules.attention_mutants import (
    MUTANTS,
    PROLOG,
    SPARSE,
    factor_on_queries,
    one,
    requests_as_heads,
    swap_parts,
)
from tests.rules.support import build, case, fresh, fuse, run, stock, targets

ATTENTION = (*catalog.LIFT, sparse_flash_attention.RULE, mla_prolog.RULE)
NOISE = 0.03
"""Relative error of one layer between bf16 roundings at different places, with the index picks that then flip."""


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))


FORMS = [(24, 1, 0), (1, 1, 30), (3, 2, 20), (1, 8, 17)]


@pytest.mark.parametrize(("tokens", "batch", "past"), FORMS)
def test_the_whole_layer_fuses(tokens: int, batch: int, past: int) -> None:
    c = stock(tokens, batch, past)
    program = fresh(c)
    log = fuse(program, (*catalog.LIFT, *(r for r in catalog.fusions() if "moe" not in r.name)))
    counts = log.counts()
    assert {k: counts.get(k) for k in (SPARSE, PROLOG, "add_rms_norm", "rms_norm", "rotary_mul")} == {
        SPARSE: 1, PROLOG: 1, "add_rms_norm": 2, "rms_norm": 1, "rotary_mul": 2
    }
    expected, state = run(c, fresh(c))
    found, new_state = run(c, program)
    assert _distance(expected[0], found[0]) < NOISE
    for path, tensor in state.items():
        assert _distance(tensor, new_state[path]) < 0.01, path


def test_the_caches_are_graph_inputs_in_block_form() -> None:
    program = fresh(stock(3, 2, 20))
    fuse(program, ATTENTION)
    views = {s.source: s.view for s in program.inputs if s.mutated and "indexer" not in s.source and s.view}
    assert views == {
        "kwargs['cache'].layers[0].keys": (2, 64, 1, 512),
        "kwargs['cache'].layers[0].values": (2, 64, 1, 64),
    }
    prolog = next(n for n in program.gm.graph.nodes if "mla_prolog" in str(n.target))
    assert [prolog.args[i].op for i in (9, 10)] == ["placeholder", "placeholder"]


def test_eager_attention_fuses_as_well() -> None:
    c = case(build(attn_implementation="eager"), 3, past=20)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert log.counts()[SPARSE] == log.counts()[PROLOG] == 1
    assert _distance(run(c, fresh(c))[0][0], run(c, program)[0][0]) < NOISE


def test_fp32_model_is_left_alone_with_the_clause_as_reason() -> None:
    c = stock(3, 2, 20, torch.float32)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and "float32" in m.reason for m in log.misses)
    assert torch.equal(run(c, fresh(c))[0][0], run(c, program)[0][0])


def test_padded_batch_is_left_alone() -> None:
    padding = torch.ones(2, 23, dtype=torch.long)
    padding[0, :4] = 0
    c = case(build(), 3, batch=2, past=20, attention_mask=padding)
    program = fresh(c)
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and "padding or custom mask" in m.reason for m in log.misses)
    assert torch.equal(run(c, fresh(c))[0][0], run(c, program)[0][0])


@pytest.mark.parametrize(("mutate", "rule", "reason"), MUTANTS, ids=[m[0].__name__.strip("_") for m in MUTANTS])
def test_a_mutant_is_refused_with_its_reason_and_stays_right(
    mutate: Callable[[Program], None], rule: str, reason: str
) -> None:
    c = stock(3, 2, 20)
    mutant, untouched = fresh(c), fresh(c)
    for program in (mutant, untouched):
        mutate(program)
        program.gm.recompile()
    log = fuse(mutant, ATTENTION)
    assert rule not in log.counts()
    assert any(m.rule == rule and reason in m.reason for m in log.misses), [str(m) for m in log.misses]
    expected, state = run(c, untouched)
    found, new_state = run(c, mutant)
    assert (_distance(run(c, fresh(c))[0][0], expected[0]) > 0) is (mutate is not requests_as_heads)
    tolerance = NOISE if log.counts().get(SPARSE) else 0.0
    assert _distance(expected[0], found[0]) <= tolerance
    for path, tensor in state.items():
        assert _distance(tensor, new_state[path]) <= 0.01, path


@pytest.mark.parametrize("change", [swap_parts(0, 1), factor_on_queries], ids=["rope first", "factor on queries"])
def test_the_same_scores_in_other_words_fuse(change: Callable[[Program], None]) -> None:
    c = stock(3, 2, 20)
    program = fresh(c)
    change(program)
    program.gm.recompile()
    log = fuse(program, ATTENTION)
    assert log.counts()[SPARSE] == log.counts()[PROLOG] == 1
    assert _distance(run(c, fresh(c))[0][0], run(c, program)[0][0]) < NOISE


def test_a_first_query_that_sees_nothing_is_refused() -> None:
    """Its softmax is NaN in the model; the op's is not."""
    program = fresh(stock(24))
    compare = one(program, aten.le.Tensor)
    editor = Editor(program.gm)
    with editor.before(compare):
        queries = editor.call(aten.arange.start, -1, 23, device=torch.device("cpu"))
        compare.args = (compare.args[0], editor.reshape(queries, list(shape(compare.args[1]))))  # type: ignore[arg-type]
    log = fuse(program, ATTENTION)
    assert SPARSE not in log.counts()
    assert any(m.rule == SPARSE and m.reason == "the first query sees no key" for m in log.misses)


def test_an_extra_user_of_the_latent_query_is_served() -> None:
    c = stock(3, 2, 20)
    program, plain = fresh(c), fresh(c)
    for p in (program, plain):
        weight = next(n for n in p.gm.graph.nodes if n.op == "placeholder" and "q_b_proj" in n.name)
        latent = next(iter(weight.users)).args[0]
        output = next(iter(reversed(p.gm.graph.nodes)))
        output.args = ((*output.args[0], latent),)
        p.gm.recompile()
    log = fuse(program, ATTENTION)
    assert log.counts()[PROLOG] == 1
    assert _distance(run(c, plain)[0][1], run(c, program)[0][1]) < 0.01


def test_an_impossible_block_size_is_refused() -> None:
    log = fuse(fresh(stock(3, 2, 20)), ATTENTION, block_size=48)
    assert any(m.rule == SPARSE and "block_size 48" in m.reason for m in log.misses)


def test_transpose_batchmatmul_is_used_where_it_is_legal() -> None:
    program = fresh(stock(3, 2, 20))
    fuse(program, ATTENTION)
    assert targets(program).count("npu.npu_transpose_batchmatmul.default") == 1
