"""Streams and core limits of single layers: cases that can be checked by hand, and random graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Pin, Pins, PlanError, to_schedule
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule, search, splits
from cannopy.stream_scheduler.scheduler.problem import Problem
from cannopy.stream_scheduler.scheduler.windows import legal
from cannopy.stream_scheduler.simulator import Machine, Schedule, simulate
from cannopy.superkernel import SuperKernels
from tests.scheduler.graphs import BOTH, CUBE, VECTOR, groups, random_graph, shared_expert, task, violations
from tests.simulator.loads import Fixed
from tests.simulator.loads import machine as plain_machine

A3 = Machine.of(load_hardware("atlas-a3"), load_constants())


def plan(graph: Schedule, streams: int = 2, **more):
    options = ScheduleOptions("atlas-a3", streams, groups=groups(graph), **more)
    return schedule(graph, A3, options, SuperKernels("atlas-a3"))


def problem(tasks, machine=A3, **more) -> Problem:
    return Problem(tasks, machine, ScheduleOptions(threshold=0.0, **more))


def test_the_longer_chain_goes_first() -> None:
    """S0 = V20 C40 V20 and S1 = V30 C20 V20 on exclusive pools take 100 us, 110 when S1 is first (torchair's guide)."""
    chains = {"S0": [(VECTOR, 20), (CUBE, 40), (VECTOR, 20)], "S1": [(VECTOR, 30), (CUBE, 20), (VECTOR, 20)]}
    tasks = []
    for name in ("S1", "S0"):
        for i, (cores, us) in enumerate(chains[name]):
            before = (f"{name}.{i - 1}",) if i else ()
            tasks.append(dataclasses.replace(task(f"{name}.{i}", "x", cores, 1, *before), load=Fixed(us, cores)))
    tasks.append(dataclasses.replace(task("end", "x", VECTOR, 1, "S0.2", "S1.2"), load=Fixed(5, VECTOR)))
    found = search.unlimited(problem(tasks, plain_machine()), 2)
    assert found.us == pytest.approx(105)
    assert found.solution.stream_count == 2


def test_the_shared_expert_hides_behind_dispatch_and_combine() -> None:
    graph = shared_expert()
    found = plan(graph, pins=Pins({"prefetch": "forbid", "super_kernel": "forbid"}))
    assert found.streams == ("main", "side1")
    side = {p.node for p in found.placements if p.stream == "side1"}
    assert {"0.shared_up", "0.shared_act", "0.shared_down"} <= side
    spans = simulate(to_schedule(found, graph), A3).spans
    for one, other in (("0.shared_up", "0.dispatch"), ("0.shared_down", "0.combine")):
        assert min(spans[one].end, spans[other].end) - max(spans[one].start, spans[other].start) > spans[one].us / 2
    chain = ["norm", "router", "gating", "dispatch", "experts_up", "experts_act", "experts_down", "combine", "add"]
    alone = sum(t.load.profile(*t.load.cores, 0.0).us + A3.gap_us for t in graph.tasks if t.name[2:] in chain)
    assert found.predicted_us == pytest.approx(alone, rel=0.02)


def test_two_branches_of_collectives_share_the_chip_by_limits() -> None:
    """Both branches talk to other dies: without limits they could hang, so they run side by side with limits or not at
    all, and the longer branch gets more cores."""
    tasks = [task("in", "add_rms_norm", VECTOR, 2)]
    for name, work, ring in (("a", 60, "all_gather"), ("b", 25, "moe_dispatch")):
        tasks += [task(f"{name}0", ring, VECTOR, 2, "in"), task(f"{name}1", "mla_prolog", BOTH, work, f"{name}0"),
                  task(f"{name}2", "mla_prolog", BOTH, work, f"{name}1")]
    graph = Schedule((*tasks, task("out", "elementwise", VECTOR, 1, "a2", "b2")), graphs=0)
    # Kernels that do not scale down well: a third of the cores is no third of the speed.
    graph = graph.replace([dataclasses.replace(t, load=dataclasses.replace(t.load, fixed=30.0)) for t in graph.tasks])
    found = plan(graph)
    assert found.streams == ("main", "side1")
    limits = {p.node: p.cores for p in found.placements}
    assert limits["a1"] is not None
    assert limits["b1"] is not None
    assert limits["a1"][0] > limits["b1"][0]
    assert limits["a1"][0] + limits["b1"][0] <= 24
    assert limits["in"] is None
    assert not violations(found, graph)
    forbidden = plan(graph, pins=Pins({"core_limits": "forbid"}))
    assert all(p.cores is None for p in forbidden.placements)
    assert not violations(forbidden, graph)
    assert (forbidden.predicted_us or 0) > (found.predicted_us or 0)


@pytest.mark.parametrize("part", range(6))
def test_random_graphs_get_safe_plans_that_are_not_slower(part: int) -> None:
    sides = limits = 0
    for seed in range(part * 25, part * 25 + 25):
        graph = random_graph(seed)
        found = plan(graph, 2 + seed % 3)
        assert violations(found, graph) == [], seed
        assert found.lower_bound_us <= found.predicted_us <= found.serial_us, seed
        assert len(found.streams) <= 2 + seed % 3
        sides += len(found.streams) > 1
        limits += any(p.cores for p in found.placements)
    assert sides >= 10  # otherwise nothing was tried
    assert Counter(p.node for p in found.placements) == Counter(t.name for t in graph.tasks)


def test_without_branches_nothing_changes() -> None:
    tasks = [task(f"k{i}", "add_rms_norm", VECTOR, 5, *([f"k{i - 1}"] if i else [])) for i in range(6)]
    found = plan(Schedule(tuple(tasks), graphs=0), 4, pins=Pins({"super_kernel": "forbid"}))
    assert found.changes_nothing
    assert found.predicted_us == found.serial_us
    assert {d.reason for d in found.decisions if d.feature == "streams"} == {
        "no two kernels are independent of each other"}


def test_pins_and_switches() -> None:
    graph = shared_expert(2)
    pins = (Pin("1.shared_up", stream="main"), Pin("1.shared_down", stream="side1"),
            Pin("0.router", prefetch=False), Pin("0.shared_up", super_kernel=False, cores="whole"))
    found = plan(graph, pins=Pins({}, pins))
    placed = found.by_node
    assert placed["1.shared_up"].stream == "main"
    assert placed["1.shared_down"].stream == "side1"
    assert placed["0.shared_up"].cores is None
    assert "0.router" not in {f.before for f in found.prefetches}
    assert violations(found, graph) == []
    limited = plan(graph, pins=Pins({}, (Pin("0.experts_up", cores=(12, 24)),)))
    assert limited.by_node["0.experts_up"].cores == (12, 24)
    assert violations(limited, graph) == []
    nothing = plan(graph, pins=Pins(dict.fromkeys(("streams", "prefetch", "super_kernel"), "forbid")))
    assert nothing.changes_nothing
    for pin, problem_text in (
        (Pin("0.shared_upp"), "did you mean '0.shared_up'"),
        (Pin("0.shared_up", stream="side7"), "did you mean 'side1'"),
        (Pin("1.add", stream="side1"), "would not be joined"),
        (Pin("0.dispatch", super_kernel=True), r"can hold it: moe_dispatch does not fuse \(torchair"),
        (Pin("0.experts_up", prefetch=True), "which part of its weights it reads is not known before"),
        (Pin("0.norm", prefetch=True), "it reads no weight"),
        (Pin("0.router", prefetch=True), "no window is open"),
    ):
        with pytest.raises(PlanError, match=problem_text):
            plan(graph, pins=Pins({}, (pin,)))
    for feature, pin in (
        ("streams", Pin("1.shared_down", stream="side1")), ("core_limits", Pin("0.experts_up", cores=(12, 24))),
        ("prefetch", Pin("0.router", prefetch=True)), ("super_kernel", Pin("0.gating", super_kernel=True)),
    ):
        with pytest.raises(PlanError, match=f"the pin of {pin.node} cannot be met: {feature} is forbidden"):
            plan(graph, pins=Pins({feature: "forbid"}, (pin,)))
    alone = Schedule((task("one", "add_rms_norm", VECTOR, 5), task("two", "moe_dispatch", VECTOR, 5, "one")), graphs=0)
    with pytest.raises(PlanError, match="no kernel that fuses stands next to it"):
        plan(alone, pins=Pins({}, (Pin("one", super_kernel=True),)))
    with pytest.raises(PlanError, match="core_limits is forced, but possible nowhere"):
        plan(Schedule((task("one", "add_rms_norm", VECTOR, 5),), graphs=0), pins=Pins({"core_limits": "force"}))


def test_a_forced_feature_is_applied_where_it_loses() -> None:
    graph = shared_expert()
    forced = plan(graph, pins=Pins({"core_limits": "force", "prefetch": "forbid", "super_kernel": "forbid"}))
    assert any(p.cores for p in forced.placements)
    assert violations(forced, graph) == []
    assert any(d.applied and d.reason == "forced" for d in forced.decisions if d.feature == "core_limits")


def test_splits_are_what_the_chip_allows() -> None:
    pairs = splits.splits(A3, 2)
    assert ((16, 32), (8, 16)) in pairs
    assert ((12, 24), (12, 24)) in pairs
    for name in ("Ascend910_9391", "Ascend910_9362", "Ascend910B1", "atlas-950"):
        machine = Machine.of(load_hardware(name), load_constants())
        for streams in (2, 3, 4):
            for split in splits.splits(machine, streams):
                assert sum(c for c, _ in split) == machine.cube_cores
                assert all(v * machine.cube_cores == c * machine.vector_cores for c, v in split)
    assert splits.step(Machine.of(load_hardware("Ascend910_9362"), load_constants())) == 2


def test_legality_by_hand() -> None:
    """Two kernels side by side: limits that fit, limits that do not, one limit beside the whole chip."""
    tasks = [task("in", "x", VECTOR, 1), task("a", "x", CUBE, 9, "in"), task("b", "x", CUBE, 9, "in"),
             task("out", "x", VECTOR, 1, "a", "b")]
    p = problem(tasks)
    base = dataclasses.replace(p.serial(), streams=(0, 0, 1, 0))

    def allowed(a, b, waits=()) -> bool:
        return legal(p, dataclasses.replace(base, cores=(None, a, b, None), waits=waits))

    assert allowed(None, None)
    assert allowed((16, 32), (8, 16))
    assert not allowed((16, 32), (12, 24))
    assert not allowed((16, 32), None)
    assert allowed((16, 32), None, waits=((2, 1),))
