"""SuperKernel regions: what they hold, where they are cut, when there is none."""

from __future__ import annotations

import dataclasses

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.cost.kernels import all_kernels
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.regions import FUSED
from cannopy.stream_scheduler.plan import Pin, Pins
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
from cannopy.stream_scheduler.simulator import Machine, Schedule
from cannopy.superkernel import SuperKernels, table, why_not
from tests.scheduler.graphs import CUBE, VECTOR, groups, random_graph, shared_expert, task, violations

A3 = Machine.of(load_hardware("atlas-a3"), load_constants())


def chain(*kernels: str) -> Schedule:
    tasks = []
    for i, kernel in enumerate(kernels):
        cores = CUBE if "matmul" in kernel else VECTOR
        tasks.append(task(f"k{i}", kernel, cores, 5, *([f"k{i - 1}"] if i else [])))
    return Schedule(tuple(tasks), graphs=0)


def plan(graph: Schedule, fuser: SuperKernels | None = None, **more):
    options = ScheduleOptions("atlas-a3", groups=groups(graph), **more)
    return schedule(graph, A3, options, fuser or SuperKernels("atlas-a3"))


def test_every_entry_is_a_kernel_and_the_networks_fuse_the_same() -> None:
    assert set(table()) <= set(all_kernels())
    assert {name for name, entry in table().items() if entry.fuses} == FUSED
    assert all(entry.source for entry in table().values())


def test_maximal_runs_with_the_reason_of_every_cut() -> None:
    graph = chain("add_rms_norm", "bf16_matmul", "swiglu", "moe_dispatch", "bf16_matmul", "rotary", "bf16_matmul",
                  "swiglu")
    tasks = [dataclasses.replace(t, cores=(12, 24) if i == 7 else None) for i, t in enumerate(graph.tasks)]
    found = SuperKernels("atlas-a3").runs(tasks, frozenset({"k1"}))
    assert found.runs == ()
    found = SuperKernels("atlas-a3").runs(tasks)
    assert found.runs == ((0, 1, 2),)
    assert [(cut.task.name, cut.reason.split(" (")[0]) for cut in found.cuts] == [
        ("k3", "moe_dispatch does not fuse"),
        ("k5", "rotary is not known to fuse; a kernel that does not fuse splits the region"),
        ("k7", "the core limit changes from the whole chip to 12 cube and 24 vector cores"),
    ]


def test_streams_have_regions_of_their_own() -> None:
    tasks = [dataclasses.replace(t, stream="side1" if i % 2 else "main")
             for i, t in enumerate(chain(*["bf16_matmul", "swiglu"] * 3).tasks)]
    assert SuperKernels("atlas-a3").runs(tasks).runs == ((0, 2, 4), (1, 3, 5))


def test_where_there_are_none() -> None:
    found = plan(chain(*["add_rms_norm", "bf16_matmul"] * 4), SuperKernels("atlas-950"))
    assert found.regions == ()
    reason = next(d.reason for d in found.decisions if d.feature == "super_kernel")
    assert "need one of atlas-a2, atlas-a3" in reason


def test_a_region_saves_the_starts_of_all_kernels_but_the_first() -> None:
    graph = chain("embedding", *["add_rms_norm", "bf16_matmul"] * 4, "embedding")
    found = plan(graph)
    (region,) = found.regions
    assert region.options == "strict-scope-check=bypass"
    assert [p.node for p in found.placements if p.super_kernel == region.name] == [f"k{i}" for i in range(1, 9)]
    saved = 7 * (min(A3.saved_us, 2.0) - A3.sync_us)
    assert found.serial_us - found.predicted_us == pytest.approx(saved, abs=1e-6)
    assert [d.applied for d in found.decisions if d.reason == why_not("embedding")] == [False, False]


def test_a_region_that_would_hold_the_cores_of_another_stream_is_cut() -> None:
    """Beside two streams a region of all kernels would make one of them wait for its end."""
    graph = shared_expert(3)
    found = plan(graph)
    assert violations(found, graph) == []
    without = plan(graph, pins=Pins({"super_kernel": "forbid"}))
    assert without.regions == ()
    assert found.predicted_us <= without.predicted_us


def test_kernels_kept_out_and_put_in() -> None:
    graph = chain(*["add_rms_norm", "bf16_matmul"] * 4)
    found = plan(graph, pins=Pins({}, (Pin("k3", super_kernel=False),)))
    assert found.by_node["k3"].super_kernel is None
    assert len(found.regions) == 2
    small = chain("embedding", "add_rms_norm", "bf16_matmul", *["embedding"] * 60)
    assert plan(small).regions == ()  # less than the threshold
    assert plan(small, pins=Pins({}, (Pin("k1", super_kernel=True),))).by_node["k1"].super_kernel is not None


@pytest.mark.parametrize(("seed", "regions"), [(75, 4), (97, 3), (114, 0)])
def test_a_region_waits_for_no_other_stream_inside_whatever_the_times(seed: int, regions: int) -> None:
    """At the predicted times what they wait for has ended before the region starts; nothing orders it so."""
    graph = random_graph(seed)
    found = plan(graph)
    assert violations(found, graph) == []
    assert len(found.streams) == 2
    assert len(found.regions) == regions
