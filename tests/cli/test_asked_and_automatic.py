"""A plan of the scheduler that cannot be used is followed by a lesser one, and the report says why; what is forced,
forbidden or pinned is done, or it is an error that names the line."""

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
        for name in ("up", "down", "last", "side"):
            setattr(self, name, torch.nn.Linear(4096, 4096, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(torch.tanh(self.up(x)))) + self.side(torch.relu(x))


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


def pinned(program: Program, folder: Path, kernels: str, features: str = "") -> Plan:
    """The scheduler's plan with pins of ``kernels``, in line 5 of a file, and switches of ``features``."""
    file = folder / "pins.yaml"
    file.write_text(f"target: atlas-a3\npins:\n  features: {{{features}}}\n  kernels:\n"
                    + "".join(f"  - {{layers: g1, {one}}}\n" for one in kernels.split("; ") if one))
    return planning.make(program, STAGE, "atlas-a3", file).plan


@pytest.mark.parametrize(("pin", "node", "found"), [
    ("kernel: aten.mm#2, stream: side1", "mm_default_1", {"stream": "side1"}),
    ("kernel: aten.relu, stream: main; kernel: aten.mm#4, stream: main", "mm_default_3", {"stream": "main"}),
    ("kernel: aten.mm#2, cores: c8v16", "mm_default_1", {"cores": (8, 16)}),
    ("kernel: aten.mm#2, cores: whole", "mm_default_1", {"cores": None}),
    ("kernel: aten.mm#2, super_kernel: false", "mm_default_1", {"super_kernel": None}),
])
def test_a_pin_is_kept(lowered: Program, tmp_path: Path, pin: str, node: str, found: dict[str, object]) -> None:
    placed = pinned(lowered, tmp_path, pin).by_node[node]
    assert {name: getattr(placed, name) for name in found} == found


def test_pins_of_regions_and_prefetches(lowered: Program, tmp_path: Path) -> None:
    one_stream = "streams: forbid"
    plain = pinned(lowered, tmp_path, "", f"{one_stream}, super_kernel: forbid")
    node = plain.prefetches[0].before
    key = f"aten.mm#{int(node.rpartition('_')[2]) + 1}"
    kept = pinned(lowered, tmp_path, f"kernel: {key}, prefetch: true", one_stream)
    assert node in {fetch.before for fetch in kept.prefetches}
    fused = pinned(lowered, tmp_path, "kernel: aten.mm#2, super_kernel: true", one_stream)
    assert fused.by_node["mm_default_1"].super_kernel == fused.by_node["mm_default_2"].super_kernel is not None
    without = pinned(lowered, tmp_path, f"kernel: {key}, prefetch: false", one_stream)
    assert node not in {fetch.before for fetch in without.prefetches}


@pytest.mark.parametrize(("features", "holds"), [
    ("streams: forbid", lambda plan: plan.streams == ("main",)),
    ("streams: force", lambda plan: len(plan.streams) == 2),
    ("core_limits: forbid", lambda plan: all(p.cores is None for p in plan.placements)),
    ("core_limits: force", lambda plan: any(p.cores for p in plan.placements)),
    ("prefetch: forbid", lambda plan: not plan.prefetches),
    ("prefetch: force", lambda plan: len(plan.prefetches) > 1),
    ("super_kernel: forbid", lambda plan: not plan.regions),
    ("streams: forbid, super_kernel: force", lambda plan: len(plan.regions) == 1),
])
def test_a_switch_is_kept_in_a_file_and_in_the_pipeline(lowered: Program, tmp_path: Path, features: str,
                                                        holds: Callable[[Plan], bool]) -> None:
    assert holds(pinned(lowered, tmp_path, "", features))
    (stage,) = parse(f"{DEFAULT}{{{features.replace(': ', '=').replace(' ', '')}}}").stages[-1:]
    assert holds(planning.make(lowered, stage, "atlas-a3").plan)


@pytest.mark.parametrize(("pin", "features", "words"), [
    ("kernel: aten.add.Tensor, stream: side1", "", r"nothing of its layer reads it: .*\n    \w+: line 5 "),
    ("kernel: aten.relu, stream: side5", "", r"unknown stream .*'side5'; did you mean 'side1'\?\n    relu: line 5 "),
    ("kernel: aten.mm#2, cores: 8", "", r"line 5: pins, kernel 1: cores: expected .* as in c16v32, found 8"),
    ("kernel: aten.tanh, super_kernel: true", "", r"hold it: elementwise is not known to fuse.*\n    tanh: line 5 "),
    ("kernel: aten.tanh, prefetch: true", "", r"tanh cannot be met: it reads no weight\n    tanh: line 5 "),
    ("kernel: aten.mm#2, prefetch: true", "prefetch: forbid", r"prefetch is forbidden; .*\n    mm_default_1: line 5 "),
    ("kernel: aten.mm#2, stream: side1", "streams: forbid", r"streams is forbidden; .*\n    mm_default_1: line 5 "),
    ("kernel: aten.mm#2, cores: c8v16; kernel: aten.mm#2, stream: main", "",
     r"line 6: pins, kernel 2: aten.mm#2 of layer g1 is pinned already, in line 5; say all of it there"),
    ("kernel: aten.mm#9, prefetch: true", "", r"line 5: pins, kernel 1: unknown kernel .*'aten.mm#9'; did you mean"),
])
def test_what_cannot_be_kept_names_its_line(lowered: Program, tmp_path: Path, pin: str, features: str,
                                            words: str) -> None:
    with pytest.raises(planning.PlanFileError, match=r"pins\.yaml: .*" + words):
        pinned(lowered, tmp_path, pin, features)
