"""Clauses that hold for some versions of CANN only are judged by the version that is lowered for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu  # noqa: F401  (registers the npu ops)
from torch import fx

from cannopy import pipeline
from cannopy.backend.host import target
from cannopy.fusion_rules import contracts
from cannopy.fusion_rules.contracts import checker
from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.rule import Context
from cannopy.options import Options
from tests.contracts.calls import LEGAL
from tests.passes.graphs import program_of

ATTENTION, RMS_NORM = "npu_sparse_flash_attention", "npu_rms_norm"


def _clause(op: str, given: dict[str, Any], cann: str | None) -> str:
    """The first clause that a call breaks for a version, "" when it is legal."""
    context = Context(None, None, "atlas-a3", cann=cann)  # type: ignore[arg-type]
    refusal = illegal(op, (), given, fx.Graph().placeholder("x"), context)
    return refusal.clause.removeprefix(f"{op}.") if refusal else ""


@pytest.mark.parametrize(("cann", "clause"), [(None, "value-given"), ("9.0.0", "value-given"), ("9.2.0", "")])
def test_a_limit_that_a_later_version_lifts(cann: str | None, clause: str) -> None:
    call = next(iter(LEGAL[ATTENTION].values()))()
    assert _clause(ATTENTION, call | {"value": None}, cann) == clause


def test_an_op_that_a_later_version_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = contracts.load_contract(RMS_NORM)
    later = SimpleNamespace(**{**vars(contract), "cann": "9.1.0"})
    monkeypatch.setattr(checker, "load_contract", lambda name: later)
    checker._broken.cache_clear()
    call = next(iter(LEGAL[RMS_NORM].values()))()
    assert [_clause(RMS_NORM, call, v) for v in ("9.0.0", "9.1.0.rc1", "9.1.0", None)] == ["cann", "cann", "", ""]
    checker._broken.cache_clear()


def test_rules_see_the_version_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    monkeypatch.setattr(pipeline, "apply", lambda rules, context, log: seen.add(context.cann) or 0)
    with target.using("atlas-a3", cann="9.2.0"):
        pipeline.run(program_of(lambda x: x + 1, torch.ones(2)), Options(target="atlas-a3"))
    assert seen == {"9.2.0"}
