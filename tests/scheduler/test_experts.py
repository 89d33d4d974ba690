"""Plans of the four models that experts have written for Ascend, at full size in their published decode layout."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.schedules import EXPERTS, automatic, expert_plan, graph, machine
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.setting import Load
from cannopy.stream_scheduler.plan import Plan, to_schedule
from cannopy.stream_scheduler.plan.text import from_yaml, to_yaml
from cannopy.stream_scheduler.scheduler import layer as layer_of_scheduler
from cannopy.stream_scheduler.scheduler.collectives import groups_by_ranks
from cannopy.stream_scheduler.simulator import Schedule, simulate
from cannopy.stream_scheduler.verifier import GraphFacts, Violation, verify_plan
from cannopy.superkernel import why_not


@pytest.fixture(scope="module", params=list(EXPERTS))
def case(request: pytest.FixtureRequest) -> tuple[str, Schedule, Plan]:
    """Name, kernels on one stream, automatic plan."""
    tasks = graph(EXPERTS[request.param])
    return request.param, tasks, automatic(tasks)


def wrong(plan: Plan, tasks: Schedule) -> list[Violation]:
    sizes = {w.name: int(w.bytes) for t in tasks.tasks for w in t.weights}
    facts = GraphFacts(frozenset({tasks.tasks[-1].name}), (), groups_by_ranks(tasks.tasks), sizes)
    return verify_plan(plan, tasks, load_hardware("atlas-a3"), facts, lambda kernel: why_not(kernel) or "")


def test_expert_and_automatic_plan(case: tuple[str, Schedule, Plan]) -> None:
    """The expert's placement is a plan that the verifier takes, with the time that its network is predicted to take;
    the automatic plan passes too and is no slower, and at least 3 % faster than one stream."""
    name, tasks, plan = case
    expert = expert_plan(name)
    placed = EXPERTS[name].estimate(load_hardware("atlas-a3"), _constants()).trace.step_us
    us = simulate(to_schedule(expert, tasks), machine()).step_us
    assert us == pytest.approx(placed, rel=1e-9)
    assert not expert.changes_nothing
    assert wrong(expert, tasks) == []
    assert wrong(plan, tasks) == []
    assert plan.predicted_us == pytest.approx(simulate(to_schedule(plan, tasks), machine()).step_us, rel=1e-9)
    assert plan.lower_bound_us <= plan.predicted_us <= us
    assert plan.predicted_us <= 0.97 * plan.serial_us


@pytest.mark.parametrize("case", [name for name in EXPERTS if name != "DeepSeek-V3.2-Exp"], indirect=True)
def test_plan_files_give_the_plan_back(case: tuple[str, Schedule, Plan]) -> None:
    """Of all but the largest, which has no form that the others have not."""
    name, tasks, plan = case
    for one in (plan, expert_plan(name)):
        text = to_yaml(one, tasks)
        again = from_yaml(text, tasks)
        assert dataclasses.replace(again, predicted_us=None, serial_us=None, lower_bound_us=None) == (
            dataclasses.replace(one, predicted_us=None, serial_us=None, lower_bound_us=None))
        assert text.count("\n") < 420  # layers that are placed alike share a block


@pytest.mark.parametrize("case", ["LongCat-Flash"], indirect=True)
def test_longcat_shares_the_chip_in_the_second_stage(case: tuple[str, Schedule, Plan]) -> None:
    """Two streams; none of the first attention is limited; behind it the experts run on a side stream beside the dense
    path, and the two limits that they are given make up the chip."""
    _, _, plan = case
    assert plan.streams == ("main", "side1")
    layer = [p for p in plan.placements if p.node.startswith("5.")]
    stage = next(i for i, p in enumerate(layer) if p.node == "5.post_norm_0")
    assert all(p.cores is None and p.stream == "main" for p in layer[: stage + 1])
    experts = [p for p in layer if p.node in ("5.router", "5.dispatch", "5.experts_gate_up", "5.combine")]
    assert {p.stream for p in experts} == {"side1"}
    limits = {stream: {p.cores for p in layer[stage + 1 :] if p.stream == stream and p.cores}
              for stream in plan.streams}
    assert len(limits["main"]) == len(limits["side1"]) == 1
    (main,), (side,) = limits["main"], limits["side1"]
    assert (main[0] + side[0], main[1] + side[1]) == (24, 48)


def test_alike_layers_are_solved_once_and_the_plan_is_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    v32 = EXPERTS["DeepSeek-V3.2-Exp"]
    tasks = graph(dataclasses.replace(v32, load=Load("decode", 2, 65536, 0)))
    assert len({t.layer for t in tasks.tasks if t.layer is not None}) == 61
    solved: list[int] = []
    streams = layer_of_scheduler.streams
    monkeypatch.setattr(layer_of_scheduler, "streams", lambda problem: solved.append(1) or streams(problem))
    plan = automatic(tasks)
    assert len(solved) <= 8, "61 layers are of a few kinds"
    assert automatic(graph(dataclasses.replace(v32, load=Load("decode", 2, 65536, 0)))) == plan


def _constants():
    from cannopy.stream_scheduler.constants import load_constants

    return load_constants()
