"""Layers of published models against the exact solver, in the model that both can be run in."""

from __future__ import annotations

import pytest

from benchmarks.optimum import common_machine, common_tasks, optimum
from benchmarks.schedules import distinct_layers, gap, machine
from cannopy.stream_scheduler.scheduler import ScheduleOptions, search
from cannopy.stream_scheduler.scheduler.problem import Problem
from tests.scheduler.graphs import CUBE, VECTOR, random_graph, task

SECONDS = 10.0


@pytest.mark.parametrize("name", ["deepseek-v3.2", "kimi-k2", "longcat-flash-lite", "qwen3-30b-a3b"])
def test_within_three_percent_of_the_best_plan(name: str) -> None:
    """Decode with 4 sequences; the solver proves its best within seconds."""
    layers = [layer for layer in distinct_layers([name]) if layer[1].startswith("decode, batch 4,")]
    assert layers
    for layer in layers:
        found = gap(*layer, seconds=SECONDS)
        assert found.gap <= 0.03, found
        assert found.bound_us <= found.us * (1 + 1e-3), found


def test_the_solver_by_hand() -> None:
    """Two kernels that halve their speed with half the cores, and a chain of two that does not use what they use: as
    good one after the other as side by side, 2 x 20, while the chain fits beside."""
    tasks = [task("a", "bf16_matmul", CUBE, 20), task("b", "bf16_matmul", CUBE, 20), task("c", "swiglu", VECTOR, 15),
             task("d", "swiglu", VECTOR, 15, "c"), task("end", "elementwise", VECTOR, 1, "a", "b", "d")]
    die = machine()
    problem = Problem(common_tasks(tasks, die), common_machine(die), ScheduleOptions(threshold=0.0))
    each = [t.load.profile(*t.load.cores, 0.0).us for t in problem.tasks]
    best = optimum(problem, 2, SECONDS, problem.serial())
    assert best.proved
    assert best.us == pytest.approx(each[0] + each[1] + each[4], rel=2e-3)
    alone = optimum(problem, 1, SECONDS, problem.serial())
    assert alone.us == pytest.approx(sum(each), rel=2e-3)


def test_random_layers_are_never_better_than_the_optimum() -> None:
    """A scheduler that wins against the solver would break a rule."""
    for seed in range(8):
        die = machine()
        tasks = [t for t in random_graph(seed).tasks if t.layer == 0]
        problem = Problem(common_tasks(tasks, die), common_machine(die), ScheduleOptions(threshold=0.0))
        found = search.with_limits(problem, 2, search.unlimited(problem, 2))
        best = optimum(problem, 2, 3.0, found.solution)
        assert found.us >= best.bound_us * (1 - 2e-3), seed
        assert found.us <= problem.time(problem.serial()), seed
