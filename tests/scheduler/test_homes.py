"""A group of collectives is on one stream in all layers, whatever single kinds of layers want."""

from __future__ import annotations

import dataclasses

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Pin, Pins, Plan, PlanError
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
from cannopy.stream_scheduler.simulator import Machine, Schedule, Task
from cannopy.superkernel import SuperKernels
from tests.scheduler.graphs import BOTH, VECTOR, groups, task, violations

A3 = Machine.of(load_hardware("atlas-a3"), load_constants())
NOTHING_ELSE = {"prefetch": "forbid", "super_kernel": "forbid"}


def plan(graph: Schedule, *pins: Pin, **features: str) -> Plan:
    options = ScheduleOptions("atlas-a3", groups=groups(graph), pins=Pins({**NOTHING_ELSE, **features}, pins))
    return schedule(graph, A3, options, SuperKernels("atlas-a3"))


def slow(one: Task) -> Task:
    """Kernels that do not scale: fewer cores cost little."""
    return dataclasses.replace(one, load=dataclasses.replace(one.load, fixed=60.0))


def apart_and_together(wide: int, narrow: int) -> Schedule:
    """``wide`` layers whose exchange of experts belongs on a side stream, beside ``narrow`` ones in which it stands
    between two rings."""
    tasks: list[Task] = []
    last: tuple[str, ...] = ()
    for n in range(wide + narrow):
        p = f"{n}."
        tasks.append(task(f"{p}in", "add_rms_norm", VECTOR, 2, *last, layer=n))
        if n < wide:
            tasks += [slow(task(f"{p}a", "mla_prolog", BOTH, 6, f"{p}in", layer=n)),
                      slow(task(f"{p}b", "mla_prolog", BOTH, 6, f"{p}a", layer=n)),
                      slow(task(f"{p}experts", "moe_dispatch", VECTOR, 3, f"{p}in", layer=n))]
            ends = (f"{p}b", f"{p}experts")
        else:
            tasks += [task(f"{p}ring", "all_gather", VECTOR, 5, f"{p}in", layer=n),
                      task(f"{p}experts", "moe_dispatch", VECTOR, 5, f"{p}in", layer=n),
                      task(f"{p}ring_back", "reduce_scatter", VECTOR, 5, f"{p}experts", f"{p}ring", layer=n)]
            ends = (f"{p}ring_back",)
        tasks.append(task(f"{p}out", "elementwise", VECTOR, 1, *ends, layer=n))
        last = (f"{p}out",)
    return Schedule(tuple(tasks), graphs=0)


def streams(found: Plan, kernel: str) -> set[str]:
    return {p.stream for p in found.placements if p.node.split(".")[-1] == kernel}


def test_a_kind_follows_the_stream_that_a_larger_kind_wants() -> None:
    graph = apart_and_together(9, 1)
    found = plan(graph)
    assert violations(found, graph) == []
    assert streams(found, "experts") == {"side1"}
    assert streams(found, "ring") == streams(found, "ring_back") == {"main"}
    assert {w.node.split(".")[-1] for w in found.waits} & {"experts", "ring"}  # the two take turns, without limits
    assert found.predicted_us < found.serial_us


def test_the_group_is_on_main_where_following_costs_more_than_it_wins() -> None:
    graph = apart_and_together(1, 40)
    assert streams(plan(apart_and_together(1, 0)), "experts") == {"side1"}
    found = plan(graph)
    assert violations(found, graph) == []
    assert streams(found, "experts") == {"main"}
    assert found.predicted_us <= found.serial_us


def test_a_pin_moves_the_whole_group() -> None:
    graph = apart_and_together(2, 2)
    found = plan(graph, Pin("2.experts", stream="side1"), core_limits="forbid")
    assert violations(found, graph) == []
    assert streams(found, "experts") == {"side1"}


def test_pins_that_pull_a_group_apart_are_an_error() -> None:
    graph = apart_and_together(2, 2)
    with pytest.raises(PlanError, match=r"group experts have to be in one stream: 0\.experts is pinned to side1, and "
                                        r"2\.experts is pinned to main"):
        plan(graph, Pin("0.experts", stream="side1"), Pin("2.experts", stream="main"))
    ends = Schedule(tuple(t for t in graph.tasks if t.name != "3.out"), graphs=0)
    with pytest.raises(PlanError, match=r"group ring have to be in one stream: 2\.ring is pinned to side1, and "
                                        r"3\.ring_back can only be on main"):
        plan(ends, Pin("2.ring", stream="side1"))
