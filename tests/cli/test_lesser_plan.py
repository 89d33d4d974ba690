"""A plan of the scheduler that cannot be used is followed by a lesser one, and the report says why; never an error."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy import Options, api, planning
from cannopy.fx_passes.program import Program
from cannopy.pipeline_text import DEFAULT, parse
from cannopy.stream_scheduler import emission
from cannopy.stream_scheduler.plan import Plan, PlanError
from cannopy.stream_scheduler.simulator import ScheduleError

STAGE = parse(DEFAULT).stages[-1]


class Branches(torch.nn.Module):
    """Two chains that could run side by side."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("up", "down", "side"):
            setattr(self, name, torch.nn.Linear(4096, 4096, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) + self.side(torch.relu(x))


@pytest.fixture(scope="module")
def lowered() -> Program:
    model = Branches().to(torch.bfloat16).eval()
    options = Options(use_cache=False, pipeline=DEFAULT.removesuffix(",schedule"))
    return api.lower(model, "forward", (torch.randn(64, 4096, dtype=torch.bfloat16),), {}, options, {})[0]


@pytest.fixture
def program(lowered: Program) -> Program:
    p = lowered
    return dataclasses.replace(p, gm=copy.deepcopy(p.gm), inputs=list(p.inputs), weights=list(p.weights),
                               facts=dict(p.facts))


Spoil = Callable[[Plan], Plan]


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, always: bool = False) -> None:
    """The scheduler's plan of more than one stream goes through ``spoil``; ``always``: every plan of it."""
    real = planning.schedule

    def schedule(graph: Any, machine: Any, options: Any, fuser: Any = None) -> Plan:
        found = real(graph, machine, options, fuser)
        return found if options.pins.switch("streams") == "forbid" and not always else spoil(found)

    monkeypatch.setattr(planning, "schedule", schedule)


def backwards(plan: Plan) -> Plan:
    return dataclasses.replace(plan, placements=plan.placements[::-1])


def unmade(error: Exception) -> Spoil:
    def spoil(plan: Plan) -> Plan:
        raise error

    return spoil


@pytest.mark.parametrize(("spoil", "reason"), [
    (backwards, "a lesser one is: rejected by the schedule verifier: order: "),
    (unmade(PlanError("no room")), "a lesser one is: it cannot be made: no room"),
    (unmade(ScheduleError("it hangs")), "a lesser one is: it cannot be made: it hangs"),
])
def test_one_stream_with_the_rest(monkeypatch: pytest.MonkeyPatch, program: Program, spoil: Spoil, reason: str) -> None:
    assert len(planning.make(program, STAGE, "atlas-a3").plan.streams) == 2  # what is lost
    spoiled(monkeypatch, spoil)
    planned = planning.make(program, STAGE, "atlas-a3")
    assert planned.plan.streams == ("main",)
    assert planned.plan.prefetches
    first = planned.report()["decisions"][0]
    assert (first["where"], first["applied"]) == ("the whole graph", False)
    assert reason in first["reason"]


def test_one_stream_alone(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    spoiled(monkeypatch, backwards, always=True)
    planned = planning.make(program, STAGE, "atlas-a3")
    assert planned.plan.changes_nothing
    assert planned.plan.predicted_us == planned.plan.serial_us
    assert [d["reason"].partition(": order")[0] for d in planned.report()["decisions"]] == [
        "the plan is not used, a lesser one is: rejected by the schedule verifier"] * 2


def test_what_cannot_be_written(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    real = emission.write

    def write(program: Program, plan: Plan) -> int:
        added = real(program, plan)
        if len(plan.streams) > 1:
            raise PlanError("no result to wait for")
        return added

    monkeypatch.setattr(emission, "write", write)
    assert planning.run(program, STAGE, "atlas-a3", None) > 0
    planned = program.facts[planning.PLANNED]
    assert planned.plan.streams == ("main",)
    assert planned.plan.prefetches
    assert "it cannot be written: no result to wait for" in planned.plan.decisions[0].reason
    assert not any("scope_enter" in str(node.target) and "_user_stream_label" in node.args[0]
                   for node in program.gm.graph.nodes)  # nothing is left of the first attempt


def test_what_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch, program: Program, tmp_path: Path) -> None:
    pins = tmp_path / "pins.yaml"
    pins.write_text("target: atlas-a3\npins: {features: {super_kernel: forbid}}\n")
    (forced,) = parse(f"{DEFAULT}{{streams=force}}").stages[-1:]
    spoiled(monkeypatch, unmade(PlanError("no room")))
    with pytest.raises(planning.PlanFileError, match=r"pins\.yaml: no room"):
        planning.make(program, STAGE, "atlas-a3", pins)
    with pytest.raises(planning.PlanFileError, match="pipeline, stage schedule: no room"):
        planning.make(program, forced, "atlas-a3")
