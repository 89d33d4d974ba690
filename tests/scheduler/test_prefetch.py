"""Prefetches: where they are placed, how large they are, and where there is none."""

from __future__ import annotations

import dataclasses

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Pins, to_schedule
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
from cannopy.stream_scheduler.simulator import Machine, Schedule, simulate
from tests.scheduler.graphs import BOTH, CUBE, VECTOR, task, violations

A3 = Machine.of(load_hardware("atlas-a3"), load_constants())
MIB = 1 << 20


def plan(graph: Schedule, machine: Machine = A3, **more):
    return schedule(graph, machine, ScheduleOptions("atlas-a3", 1, **more))


def window(us: float, mib: float, kernel: str = "bf16_matmul") -> Schedule:
    """A norm, a vector kernel of ``us``, a matmul of ``mib`` and a kernel that ends the layer."""
    return Schedule((
        task("norm", "add_rms_norm", VECTOR, 2), task("quiet", "reduce", VECTOR, us, "norm"),
        task("heavy", kernel, CUBE, 1, "quiet", mib=mib), task("out", "elementwise", VECTOR, 1, "heavy"),
    ), graphs=0)


def test_as_much_as_the_window_holds() -> None:
    """The prefetch starts with the first activation and moves what its engine can in the time until the matmul; the
    rest is read by the matmul itself. A small weight is fetched whole."""
    (fetch,) = plan(window(40, 400)).prefetches
    assert (fetch.after, fetch.before, fetch.weight) == ("norm", "heavy", "w_heavy")
    spans = simulate(window(40, 400), A3).spans
    most = A3.prefetch_rate * (spans["heavy"].start - spans["norm"].end)
    assert 0.95 * most - MIB <= fetch.bytes <= A3.l2_bytes
    (small,) = plan(window(40, 8)).prefetches
    assert small.bytes == 8 * MIB
    (tensor,) = plan(window(40, 8), sizes={"w_heavy": 8 * MIB - 512}).prefetches
    assert tensor.bytes == 8 * MIB - 512


def test_it_gains_what_it_says_and_never_more_than_l2_holds() -> None:
    graph = window(400, 400)
    found = plan(graph)
    assert sum(f.bytes for f in found.prefetches) <= A3.l2_bytes
    decision = next(d for d in found.decisions if d.feature == "prefetch" and d.applied)
    assert decision.gain_us == pytest.approx(found.serial_us - found.predicted_us, abs=0.01)
    assert 0 < decision.worst_gain_us <= decision.gain_us
    tight = plan(graph, dataclasses.replace(A3, l2_bytes=20.0 * MIB))
    assert sum(f.bytes for f in tight.prefetches) <= 20 * MIB


@pytest.mark.parametrize("kernel", ["grouped_matmul_bf16", "embedding"])
def test_weights_that_data_chooses_are_left_alone(kernel: str) -> None:
    found = plan(window(40, 40, kernel))
    assert found.prefetches == ()
    assert found.predicted_us == found.serial_us


def test_not_behind_a_kernel_that_needs_the_memory() -> None:
    """Between two matmuls that read all the time there is no window; the quiet kernel before both of them is one, and
    what it cannot hold is not fetched."""
    tasks = [task("norm", "add_rms_norm", VECTOR, 2), task("quiet", "reduce", VECTOR, 12, "norm")]
    for i in range(4):
        tasks.append(task(f"heavy{i}", "bf16_matmul", CUBE, 1, tasks[-1].name, mib=64))
    graph = Schedule((*tasks, task("out", "elementwise", VECTOR, 1, "heavy3")), graphs=0)
    found = plan(graph)
    assert {f.after for f in found.prefetches} == {"norm"}
    assert {f.before for f in found.prefetches} == {"heavy0"}
    assert violations(found, graph) == []


def test_across_layers_and_each_weight_once() -> None:
    """The quiet tail of a layer fetches for the head of the next one, in every layer but the last."""
    tasks = []
    for n in range(5):
        last = (tasks[-1].name,) if tasks else ()
        tasks += [task(f"{n}.head", "mla_prolog", BOTH, 1, *last, mib=60, layer=n),
                  task(f"{n}.mid", "bf16_matmul", CUBE, 1, f"{n}.head", mib=60, layer=n),
                  task(f"{n}.tail", "moe_combine", VECTOR, 40, f"{n}.mid", layer=n)]
    graph = Schedule(tuple(tasks), graphs=0)
    found = plan(graph)
    assert [(f.after, f.before) for f in found.prefetches] == [(f"{n}.mid", f"{n + 1}.head") for n in range(4)]
    assert len({f.weight for f in found.prefetches}) == len(found.prefetches)
    assert violations(found, graph) == []
    assert found.predicted_us == pytest.approx(simulate(to_schedule(found, graph), A3).us)


def test_a_gain_that_a_wrong_cost_takes_away_is_no_gain() -> None:
    """What a prefetch of a small weight gains is less than the threshold, in the layer that it is in."""
    graph = window(1000, 6)
    found = plan(graph)
    assert found.prefetches == ()
    decision = next(d for d in found.decisions if d.feature == "prefetch")
    assert not decision.applied
    assert decision.reason.startswith("no gain")
    forced = plan(graph, pins=Pins({"prefetch": "force"}), threshold=0.0)
    assert len(forced.prefetches) == 1
