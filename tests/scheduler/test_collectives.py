"""Collectives stand in the order of the graph, which is the same on every die; times need not be."""

from __future__ import annotations

import dataclasses

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Placement
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
from cannopy.stream_scheduler.simulator import Machine, Schedule
from cannopy.stream_scheduler.verifier import GraphFacts, verify_plan
from tests.scheduler.graphs import CUBE, VECTOR, task

A3 = Machine.of(load_hardware("atlas-a3"), load_constants())


def two_branches() -> Schedule:
    """The second collective is ready first, and much hangs on it: alone, it would be started first."""
    return Schedule((
        task("in", "add_rms_norm", VECTOR, 2, layer=0),
        task("slow", "bf16_matmul", CUBE, 30, "in", layer=0),
        task("first", "all_gather", VECTOR, 3, "slow", layer=0),
        task("second", "all_gather", VECTOR, 3, "in", layer=0),
        task("long", "bf16_matmul", CUBE, 90, "second", layer=0),
        task("out", "elementwise", VECTOR, 1, "first", "long", layer=0),
    ), graphs=0)


def order(groups: dict[str, str]) -> list[str]:
    found = schedule(two_branches(), A3, ScheduleOptions("atlas-a3", groups=groups))
    return [p.node for p in found.placements if p.node in ("first", "second")]


@pytest.mark.parametrize(("first", "second", "kept"), [
    ("cannopy.dense_tp.0.1.4", "cannopy.dense_tp.0.1.4", True),
    ("cannopy.dense_tp.0.1.4", "cannopy.o_proj_tp.0.1.4", False),
    ("cannopy.cp.0.1.4", "cannopy.ep_routed.0.1.4", True),
])
def test_dies_of_a_group_start_collectives_in_one_order(first: str, second: str, kept: bool) -> None:
    assert order({"first": first, "second": second}) == (["first", "second"] if kept else ["second", "first"])


def test_a_plan_in_another_order_is_rejected() -> None:
    graph, groups = two_branches(), dict.fromkeys(("first", "second"), "cannopy.dense_tp.0.1.4")
    found = schedule(graph, A3, ScheduleOptions("atlas-a3", groups=groups))
    facts = GraphFacts(frozenset({"out"}), groups=groups)
    assert verify_plan(found, graph, load_hardware("atlas-a3"), facts) == []
    names = ("in", "second", "slow", "first", "long", "out")
    swapped = dataclasses.replace(found, placements=tuple(Placement(name) for name in names), waits=(), prefetches=())
    (wrong,) = verify_plan(swapped, graph, load_hardware("atlas-a3"), facts)
    assert (wrong.check, wrong.nodes) == ("collective order", ("second", "first"))
    assert "Leave them in the order of the graph" in str(wrong)
