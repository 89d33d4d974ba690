"""The schedule verifier takes right plans and rejects wrong ones for the right reason."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.plan.apply import serial_plan, to_schedule
from cannopy.stream_scheduler.plan.model import Placement, Plan, SuperKernelRegion, Wait
from cannopy.stream_scheduler.simulator import Machine, Schedule, ScheduleError, Task, simulate
from cannopy.stream_scheduler.verifier import GraphFacts, facts_of, verify_plan
from tests.passes.graphs import program_of
from tests.simulator.loads import Fixed
from tests.verifier.mutations import MUTATIONS, change
from tests.verifier.plans import CHIP, case

RUNS = 230
"""Mutants of each kind: 5,000 and more in all."""


def test_right_plans_are_accepted() -> None:
    for seed in range(RUNS):
        one = case(seed)
        assert one.wrong() == [], seed
        assert one.wrong(serial_plan(one.schedule, "atlas-a3")) == []


def test_there_are_enough_mutants() -> None:
    assert len(MUTATIONS) * RUNS >= 5000


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_plans_are_rejected_with_the_reason(name: str) -> None:
    check, mutate = MUTATIONS[name]
    for seed in range(RUNS):
        one = case(seed)
        plan = mutate(one, random.Random(f"{name} {seed}"))
        assert plan != one.plan, seed
        found = one.wrong(plan)
        assert check in {violation.check for violation in found}, (seed, [str(v) for v in found])
        said = next(v for v in found if v.check == check)
        assert all(node in said.reason for node in said.nodes), said


def side_by_side(limits: tuple[tuple[int, int] | None, ...], kernels: tuple[str, ...], groups: str = "") -> list[str]:
    """Checks that fail when kernels of these kinds with these limits run at once, each in a stream of its own.
    ``groups``: a letter for the group of each collective."""
    names = [f"k{i}" for i in range(len(limits))]
    tasks = (*(Task(n, Fixed(1.0, kernel=kernel)) for n, kernel in zip(names, kernels, strict=True)),
             Task("join", Fixed(1.0), deps=tuple(names)))
    streams = ["main", *(f"s{i}" for i in range(1, len(names)))]
    placed = [Placement(*one) for one in zip(names, streams, limits, strict=True)]
    plan = Plan("atlas-a3", (*placed, Placement("join")))
    facts = GraphFacts(frozenset({"join"}), groups=dict(zip(names, groups, strict=bool(groups))))
    return [v.check for v in verify_plan(plan, Schedule(tasks), CHIP, facts)]


def test_three_streams_exceed_the_chip_though_no_two_do() -> None:
    assert side_by_side(((8, 16), (8, 16), (8, 16)), ("swiglu",) * 3) == []
    assert side_by_side(((10, 20), (10, 20), (10, 20)), ("swiglu",) * 3) == ["concurrent core limits"]


def test_kernels_without_limits_wait_for_each_other_unless_both_hold_cores() -> None:
    assert side_by_side((None, None), ("bf16_matmul", "moe_dispatch")) == []
    assert side_by_side((None, (8, 16)), ("bf16_matmul", "moe_dispatch")) == []
    assert side_by_side((None, None), ("moe_combine", "moe_dispatch"), "ab") == ["hang"]
    assert side_by_side(((16, 32), (8, 16)), ("moe_combine", "moe_dispatch"), "ab") == []
    assert side_by_side(((16, 32), (8, 16)), ("moe_combine", "moe_dispatch"), "aa") == ["collective order"]
    assert side_by_side(((16, 32), (8, 16)), ("moe_combine", "moe_dispatch")) == ["collective order"]


def test_stream_fusion_lets_a_region_span_streams() -> None:
    one = case(3)
    name = one.plan.regions[0].name
    node = next(p.node for p in one.plan.placements if p.super_kernel == name)
    wide = dataclasses.replace(one.plan, regions=(SuperKernelRegion(name, "stream-fusion=1"), *one.plan.regions[1:]))
    assert "SuperKernel" in {v.check for v in one.wrong(change(one.plan, node, stream="side7"))}
    assert "SuperKernel" not in {v.check for v in one.wrong(change(wide, node, stream="side7"))}


def test_what_the_verifier_takes_the_simulator_runs() -> None:
    """No accepted plan hangs in the simulator, which knows nothing of the verifier."""
    machine = Machine.of(CHIP, load_constants())
    for seed in range(20):
        one = case(seed)
        assert len(simulate(to_schedule(one.plan, one.schedule), machine).spans) == len(one.schedule.tasks)


def crossed(limits: tuple[tuple[int, int] | None, tuple[int, int] | None], wait: bool = False, fused: bool = True,
            options: str = "") -> list[str]:
    """What is wrong with a region a, c on main whose second kernel reads b of a side stream, between ``limits`` of the
    two streams. ``wait``: a waits for b. ``fused``: there is a region at all."""
    tasks = (Task("in", Fixed(1.0)), Task("a", Fixed(1.0), deps=("in",)), Task("b", Fixed(1.0), deps=("in",)),
             Task("c", Fixed(1.0), deps=("a", "b")))
    region = "sk" if fused else None
    placed = (Placement("in"), Placement("b", "side", limits[1]), Placement("a", "main", limits[0], region),
              Placement("c", "main", limits[0], region))
    plan = Plan("atlas-a3", placed, (Wait("a", "b"),) if wait else (),
                regions=(SuperKernelRegion("sk", options),) if fused else ())
    schedule = Schedule(tasks, graphs=0)
    found = [v.check for v in verify_plan(plan, schedule, CHIP, GraphFacts(frozenset({"c"})))]
    try:
        simulate(to_schedule(plan, schedule), Machine.of(CHIP, load_constants()))
    except ScheduleError:
        assert "hang" in found
    else:
        assert "hang" not in found
    return found


def test_a_region_that_waits_inside_for_what_finds_no_cores_beside_it_hangs() -> None:
    """As the simulator sees it, which shares no code with the verifier."""
    assert crossed((None, None)) == ["hang"]
    assert crossed(((16, 32), (8, 16))) == []
    assert crossed((None, None), wait=True) == []
    assert crossed((None, None), fused=False) == []
    assert crossed((None, None), options="stream-fusion=1") == []


def test_two_regions_that_wait_inside_for_one_kernel_leave_it_cores_together() -> None:
    """8 + 8 cores are held, and the kernel that both wait for needs 8 or 16."""
    def checks(needed: int) -> set[str]:
        own = {"a0": 8, "a1": 8, "b0": 8, "b1": 8, "s": needed}
        deps = {"a0": ("in",), "b0": ("in",), "s": ("in",), "a1": ("a0", "s"), "b1": ("b0", "s"), "end": ("a1", "b1")}
        cores = {name: (cube, 0) for name, cube in own.items()}
        tasks = [Task(n, Fixed(1.0, cores.get(n, (24, 48))), deps=deps.get(n, ())) for n in ("in", *own, "end")]
        streams = {"b": "side1", "s": "side2"}
        placed = [Placement(n, streams.get(n[0], "main"), None, {"a": "ska", "b": "skb"}.get(n[0]))
                  for n in ("in", "a0", "b0", "s", "a1", "b1")]
        regions = (SuperKernelRegion("ska"), SuperKernelRegion("skb"))
        plan = Plan("atlas-a3", (*placed, Placement("end")), regions=regions)
        graph = Schedule(tuple(tasks), graphs=0)
        found = {v.check for v in verify_plan(plan, graph, CHIP, GraphFacts(frozenset({"end"})))}
        try:
            simulate(to_schedule(plan, graph), Machine.of(CHIP, load_constants()))
        except ScheduleError:
            return found
        assert not found
        return found

    assert checks(8) == set()
    assert checks(16) == {"hang"}


def test_what_a_region_waits_for_inside_is_behind_nothing_that_finds_no_cores() -> None:
    """c, in the region, waits for b, which needs vector cores alone; x needs both kinds, and one is taken."""
    def checks(names: str = "in early a x b c end", *ordered: Wait) -> set[str]:
        cores = {"a": (24, 0), "b": (0, 48), "x": (24, 48), "c": (24, 0)}
        deps = {"a": ("in",), "x": ("in",), "b": ("in", "early"), "c": ("a", "b"), "end": ("c", "x")}
        tasks = tuple(Task(n, Fixed(10.0, cores.get(n, (0, 1))), deps=deps.get(n, ())) for n in names.split())
        streams = {"x": "side1", "b": "side2", "early": "side2"}
        placed = tuple(Placement(t.name, streams.get(t.name, "main"), None, "sk" if t.name in "ac" else None)
                       for t in tasks)
        plan = Plan("atlas-a3", placed, ordered, regions=(SuperKernelRegion("sk"),))
        graph = Schedule(tasks, graphs=0)
        found = {v.check for v in verify_plan(plan, graph, CHIP, GraphFacts(frozenset({"end"})))}
        try:
            simulate(to_schedule(plan, graph), Machine.of(CHIP, load_constants()))
        except ScheduleError:
            return {*found, "seen"}
        return found

    assert checks() == {"hang", "seen"}
    assert checks("in early a b x c end", Wait("x", "b")) == set()
    assert checks("in early x a b c end", Wait("a", "x")) == set()
    assert checks("in early a x b c end", Wait("c", "x")) == {"hang", "seen"}


def test_readers_of_what_gets_a_copy_of_an_input_stay_on_the_main_stream() -> None:
    for seed in range(20):
        one = case(seed)
        for p in one.plan.placements:
            found = one.wrong(facts=dataclasses.replace(one.facts, copied={p.node: "state"}))
            assert [(v.check, v.nodes) for v in found] == ([] if p.stream == "main" else [("memory", (p.node,))])


@pytest.mark.parametrize(("new", "copied", "hazards"), [(lambda x: x, 1, 0), (torch.sin, 0, 1)])
def test_such_readers_are_found_in_a_graph(
    new: Callable[[torch.Tensor], torch.Tensor], copied: int, hazards: int
) -> None:
    """The first input reads its old value and becomes ``new`` of the second."""
    program = program_of(lambda state, x: (state.cos(), new(x)), torch.zeros(4), torch.ones(4), mutated=[0])
    facts = facts_of(program)
    (state,) = facts.written
    assert dict(facts.copied) == ({"cos": state} if copied else {})
    assert [(h.reader, h.buffer) for h in facts.hazards] == [("cos", state)] * hazards
