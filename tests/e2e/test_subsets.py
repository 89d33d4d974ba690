"""Any subset of the fusions gives the same result: parity of the final graph with each, all and some left out."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cannopy import Options, pipeline
from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import catalog
from cannopy.fx_passes.program import Program
from cannopy.parity.graph import GraphParity
from tests.extension import models as small
from tests.rules.support import build, inputs

FUSIONS = tuple(catalog.groups())
DEEPSEEK = {"first_k_dense_replace": 0}
"""One layer with latent attention, indexer, router, routed and shared experts."""
IN_IT = {"sparse_flash_attention", "mla_prolog", "moe_gating_top_k", "moe_experts", "swiglu", "add_rms_norm",
         "rms_norm", "rotary_mul"}
"""The fusions that apply in it."""


@functools.cache
def captured() -> tuple[Program, GraphParity]:
    """A call of 20 tokens behind 12 that the cache holds."""
    activate()
    model = build(**DEEPSEEK)
    args, kwargs = inputs(model, tokens=20, past=12)
    prepare_state(model, args, kwargs)
    program = capture(model, "forward", args, kwargs)
    return program, GraphParity(model, "forward", args, kwargs, program.inputs)


SMALL = ("swiglu", "add_rms_norm", "rms_norm")
"""The fusions that apply in the model of tests.extension."""


def compiled(off: frozenset[str]) -> pipeline.Compilation:
    """Compile without ``off`` and check the final graph against eager and float64, caches included."""
    captured_program, parity = captured()
    program = copy.deepcopy(captured_program)
    with target.using("atlas-a3"):
        done = pipeline.run(program, Options(fusions=dict.fromkeys(off, False)))
        report = parity.check(program)
    assert report.passed, (sorted(off), report.failures)
    assert len(report.errors) > 3, "logits and caches are compared"
    return done


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_subset_of_a_small_model(dtype: torch.dtype) -> None:
    activate()
    model, method, args, kwargs = small.call_of(small.make(dtype))
    program = capture(model, method, args, kwargs)
    parity = GraphParity(model, method, args, kwargs, program.inputs)
    applied = set()
    for size in range(len(SMALL) + 1):
        for off in itertools.combinations(SMALL, size):
            twin = copy.deepcopy(program)
            with target.using("atlas-a3"):
                done = pipeline.run(twin, Options(fusions=dict.fromkeys(off, False)))
                report = parity.check(twin)
            assert report.passed, (off, report.failures)
            found = {*done.log.counts()} & {*SMALL}
            assert not found & {*off}
            applied.add(frozenset(found))
    assert len(applied) == 2 ** len(SMALL), "each subset gives other kernels"


def counts(off: Any = ()) -> dict[str, int]:
    return compiled(frozenset(off)).log.counts()


@pytest.mark.slow
def test_all_on() -> None:
    assert {*FUSIONS} >= IN_IT
    assert {*counts()} >= IN_IT


def test_all_off() -> None:
    assert not {*FUSIONS} & {*counts(FUSIONS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSIONS)
def test_one_off(name: str) -> None:
    assert name not in counts([name])


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sets(st.sampled_from(FUSIONS), min_size=2, max_size=len(FUSIONS) - 1))
def test_any_off(off: set[str]) -> None:
    assert not off & {*counts(off)}
