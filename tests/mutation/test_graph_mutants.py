"""Random changes of captured graphs: the lowered graph computes what the changed graph does. See tools/mutate.py."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cannopy.fusion_rules.engine.record import Miss
from tests.mutation import oracle, trial
from tests.mutation.cases import case
from tests.mutation.operators import Edit, mutate
from tests.mutation.table import OPERATORS

SMALL = ("moe_block", "moe_block_batched", "qwen3")


def test_there_are_many_operators_for_every_rule() -> None:
    assert len(OPERATORS) >= 60
    touched = {rule for o in OPERATORS.values() for rule in o.rules}
    assert set(trial.KEYS) <= touched


@settings(max_examples=24, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate),
          suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(OPERATORS)), st.integers(0, 1 << 20))
def test_a_mutant_computes_what_it_says(name: str, seed: int) -> None:
    outcome = trial.drawn(seed, SMALL, [name])
    assert outcome.wrong == [], outcome.command


@pytest.mark.parametrize("name", ["norm_eps", "norm_one_plus_gamma", "residual_swapped", "rope_opposite_sign"])
def test_legal_mutants_still_fuse(name: str) -> None:
    outcome = trial.one(case("qwen3"), OPERATORS[name], 3)
    assert outcome.made
    assert outcome.wrong == []
    assert outcome.lost == [], outcome.reasons


@pytest.mark.parametrize("name", ["norm_statistics_of_first_row", "glu_gelu", "rope_unequal_table_halves"])
def test_illegal_mutants_stay_apart_and_say_why(name: str) -> None:
    outcome = trial.one(case("qwen3"), OPERATORS[name], 3)
    assert outcome.made
    assert outcome.wrong == []
    assert outcome.lost
    assert outcome.silent == [], outcome.reasons


@pytest.mark.parametrize(("where", "name"), [("moe_block", "router_weights_from_biased"), ("qwen3", "norm_eps"),
                                             ("qwen3", "rope_tables_swapped"), ("moe_block", "experts_mean")])
def test_the_oracle_sees_a_fusion_that_ignores_the_change(where: str, name: str) -> None:
    """The unchanged program's result stands for a rule that fuses the mutant as if nothing had changed."""
    c = case(where)
    edit = Edit(c.fresh(), random.Random(1), c.nodes, dict(c.values))
    mutate(OPERATORS[name], edit, OPERATORS[name].sites(edit.program)[0])
    as_is, wide = oracle.plain(edit.program, edit.values), oracle.exact(edit.program, edit.values)
    assert oracle.wrong(oracle.Results(c.result.tensors), as_is, wide)


@pytest.mark.parametrize(("reason", "named"), [
    ("found mul(_, _) at model.py:12, read by add", True),
    ("found mul(_, _) at model.py:12", True),
    ("found mul(_, _) at model.py:120", False),
    ("found mul(_, _) at model.py:1", False),
    ("found mul(_, _) at other_model.py:12", False),
    ("found mul(_, _) at None", False),
])
def test_a_reason_names_whole_lines(reason: str, named: bool) -> None:
    c = case("moe_block")
    edit = Edit(c.fresh(), random.Random(0), c.nodes, {})
    edit.lines = {"model.py:12", "None"}
    assert trial._points(Miss("swiglu", "mul", reason, "mul", "model.py:12"), edit) == named
