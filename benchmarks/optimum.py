"""The best schedule of one layer by OR-Tools CP-SAT, in a model that the scheduler can be run in as well.

Every kernel has a duration for each core limit, chosen kernel by kernel; cube and vector cores are two pools; no more
kernels run at a time than there are streams; collectives of one group do not overlap. Memory bandwidth is not shared
and streams cost nothing to synchronise. This leaves out rules that plans have to keep (limits fit together stream by
stream, ends on the main stream), so the optimum may be better than what any plan can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from cannopy.stream_scheduler.plan import Cores
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution
from cannopy.stream_scheduler.scheduler.splits import limits
from cannopy.stream_scheduler.simulator import Load, Machine, Profile, Task, simulate

UNITS = 20000
"""Units of time that the solver counts in, in the time of all kernels one after the other."""


@dataclass(frozen=True)
class Alone:
    """A load as the common model has it: the time on its cores and the gap before it, no memory traffic."""

    load: Load
    gap_us: float

    @property
    def kernel(self) -> str:
        return self.load.kernel

    @property
    def cores(self) -> tuple[int, int]:
        return self.load.cores

    @property
    def work(self) -> object:
        return getattr(self.load, "work", None)

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        us = self.load.profile(cube, vector, 0.0).us + self.gap_us
        return Profile(us, 0.0, (("cube", us),))


def common_machine(machine: Machine) -> Machine:
    """``machine`` without gaps (they are in `Alone`), events and shared bandwidth."""
    return dataclasses.replace(machine, gap_us=0.0, event_us=0.0, hbm_rate=1e12, hbm_peak=1e12, graph_us=0.0)


def common_tasks(tasks: Sequence[Task], machine: Machine) -> list[Task]:
    """``tasks`` with the costs of the common model."""
    return [dataclasses.replace(task, load=Alone(task.load, machine.gap_us), weights=()) for task in tasks]


@dataclass(frozen=True)
class Optimum:
    """The best time found and what no schedule beats, in microseconds; ``proved``: they are the same."""

    us: float
    bound_us: float
    proved: bool


def optimum(problem: Problem, streams: int, seconds: float, known: Solution) -> Optimum:
    """Solve ``problem`` (of the common model) on ``streams`` streams, starting from ``known``. ``seconds``: of the
    solver's own clock, which counts work and not time, so that a busy machine gives the same result."""
    model = cp_model.CpModel()
    spans = simulate(problem.schedule(known), problem.machine).spans
    scale = UNITS / sum(problem.us)
    horizon = round(UNITS * 1.01) + problem.size
    tasks = [_Variables.make(model, problem, i, scale, horizon) for i in range(problem.size)]
    for i, task in enumerate(tasks):
        model.add_hint(task.start, round(spans[problem.tasks[i].name].start * scale))
        for cores, literal in task.modes.items():
            model.add_hint(literal, int(cores == problem.used(i, known.cores[i])))
        for j in problem.preds[i]:
            model.add(task.start >= tasks[j].end)
    intervals = [task.interval for task in tasks]
    model.add_cumulative(intervals, [task.cube for task in tasks], problem.machine.cube_cores)
    model.add_cumulative(intervals, [task.vector for task in tasks], problem.machine.vector_cores)
    model.add_cumulative(intervals, [1] * problem.size, streams)
    for group in sorted({g for g in problem.groups if g is not None}):
        model.add_no_overlap([intervals[i] for i, g in enumerate(problem.groups) if g == group])
    last = model.new_int_var(0, horizon, "last")
    model.add_max_equality(last, [task.end for task in tasks])
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"no schedule found in {seconds} s: {solver.status_name(status)}")
    return Optimum(solver.objective_value / scale, solver.best_objective_bound / scale, status == cp_model.OPTIMAL)


@dataclass(frozen=True)
class _Variables:
    """One kernel in the solver's model; ``modes``: a literal for each choice of cores."""

    start: Any
    end: Any
    interval: Any
    cube: Any
    vector: Any
    modes: Mapping[Cores, Any]

    @classmethod
    def make(cls, model: cp_model.CpModel, problem: Problem, i: int, scale: float, horizon: int) -> _Variables:
        modes = {cores: max(1, round(us * scale)) for cores, us in _modes(problem, i).items()}
        start, end = model.new_int_var(0, horizon, f"start{i}"), model.new_int_var(0, horizon, f"end{i}")
        literals = {cores: model.new_bool_var(f"mode{i}.{n}") for n, cores in enumerate(modes)}
        model.add_exactly_one(literals.values())

        def chosen(name: str, values: Sequence[int]) -> Any:
            variable = model.new_int_var_from_domain(cp_model.Domain.from_values(values), f"{name}{i}")
            model.add(variable == sum(on * value for on, value in zip(literals.values(), values, strict=True)))
            return variable

        size = chosen("us", list(modes.values()))
        interval = model.new_interval_var(start, size, end, f"run{i}")
        return cls(start, end, interval, chosen("cube", [c for c, _ in modes]), chosen("vector", [v for _, v in modes]),
                   literals)


def _modes(problem: Problem, i: int) -> dict[Cores, float]:
    """Cores and microseconds of task ``i`` without a limit and with each limit; without choices that take no less cores
    than another one and are no faster."""
    load = problem.tasks[i].load
    found = {problem.used(i, limit): 0.0 for limit in (None, *limits(problem.machine))}
    found = {cores: load.profile(*cores, 0.0).us for cores in found}
    return {cores: us for cores, us in found.items()
            if not any(other != cores and other[0] <= cores[0] and other[1] <= cores[1] and time <= us
                       for other, time in found.items())}
