"""The schedule verifier takes right plans and rejects wrong ones for the right reason."""

from __future__ import annotations

import dataclasses
import random

import pytest

from cannopy.stream_scheduler.plan.apply import serial_plan
from cannopy.stream_scheduler.plan.model import Placement, Plan, SuperKernelRegion
from cannopy.stream_scheduler.simulator import Machine, Schedule, Task
from cannopy.stream_scheduler.verifier import GraphFacts, verify_plan
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
    from cannopy.stream_scheduler.constants import load_constants
    from cannopy.stream_scheduler.plan.apply import to_schedule
    from cannopy.stream_scheduler.simulator import simulate

    machine = Machine.of(CHIP, load_constants())
    for seed in range(20):
        one = case(seed)
        assert len(simulate(to_schedule(one.plan, one.schedule), machine).spans) == len(one.schedule.tasks)
