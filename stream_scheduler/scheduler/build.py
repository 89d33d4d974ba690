"""From a graph with costs to a plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from cannopy.stream_scheduler.bounds import bounds
from cannopy.stream_scheduler.plan import (
    FEATURES,
    Decision,
    Pin,
    Placement,
    Plan,
    PlanError,
    PlannedPrefetch,
    SuperKernelRegion,
    Wait,
    serial_plan,
    to_schedule,
)
from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.segments import Segment, segments
from cannopy.stream_scheduler.scheduler import assemble, homes, layer
from cannopy.stream_scheduler.scheduler.collectives import in_graph_order
from cannopy.stream_scheduler.scheduler.fusing import Fuser
from cannopy.stream_scheduler.scheduler.options import ScheduleOptions
from cannopy.stream_scheduler.scheduler.prefetch import UNKNOWN_WEIGHTS
from cannopy.stream_scheduler.scheduler.problem import Problem, Solution
from cannopy.stream_scheduler.scheduler.stretch import Stretch
from cannopy.stream_scheduler.simulator import Machine, Schedule, Task, simulate

STUCK = "it reads weights and caches only, so nothing can make it wait: it stays on the main stream"
REPEATED = 8
"""Layers of one kind that follow one another, from which on orders are compared with prefetches; set by us: for fewer
it takes longer than it can save."""
NO_FUSER = "this target or graph mode has no SuperKernel"


def schedule(graph: Schedule, machine: Machine, options: ScheduleOptions | None = None,
             fuser: Fuser | None = None) -> Plan:
    """The plan of ``graph`` (one stream, graph order; `graph_cost.GraphSchedule.schedule`) on ``machine``.

    ``fuser`` knows what a SuperKernel can hold; without one there are no regions. The same input gives the same plan,
    and no plan is slower than one stream by its own prediction unless a feature is forced. `PlanError` for pins that
    name no kernel or cannot be met, and for a forced feature that is possible nowhere.
    """
    options = options or ScheduleOptions()
    names = {task.name for task in graph.tasks}
    for pin in options.pins.nodes:
        known("kernel", pin.node, names)
    if not graph.tasks:
        return Plan(options.target)
    for pin in options.pins.nodes:
        _refuse_contradictions(pin, options)
    graph = in_graph_order(graph, options.groups)
    work = _Work(graph, machine, options, fuser)
    work.run()
    return _checked(work, graph, machine, options)


@dataclass
class _Work:
    """Layers as they are solved. Distinct ones are solved once."""

    graph: Schedule
    machine: Machine
    options: ScheduleOptions
    fuser: Fuser | None
    parts: list[Segment] = field(default_factory=list)
    problems: dict[Hashable, Problem] = field(default_factory=dict)
    streams: dict[Hashable, layer.Streams] = field(default_factory=dict)
    extras: dict[Hashable, layer.Extras] = field(default_factory=dict)
    keys: list[Hashable] = field(default_factory=list)

    def run(self) -> None:
        """Solve every distinct layer, then every distinct pair of layers with what earlier ones prefetched."""
        pinned = frozenset(pin.node for pin in self.options.pins.nodes)
        self.parts = segments(self.graph.tasks, pinned, self.options.cannot_wait)
        self._solve_kinds()
        warm: tuple[tuple[int, int], ...] = ()
        for at, part in enumerate(self.parts):
            after = self.parts[at + 1] if at + 1 < len(self.parts) else None
            key = (part.kind, after and (after.kind, _seam(part, after)), warm)
            if key not in self.extras:
                then = None if after is None else self._solved(after)
                stretch = Stretch(self._solved(part), then, warm, machine=self.machine)
                self.extras[key] = layer.extras(stretch, self.fuser, self._why_not())
            self.keys.append(key)
            warm = self._warm(self.extras[key], len(part.tasks))

    def _solve_kinds(self) -> None:
        """Streams and limits of each kind of layer, those with the most time in the graph first."""
        kinds: dict[Hashable, list[Segment]] = {}
        for part in self.parts:
            kinds.setdefault(part.kind, []).append(part)
        first = {kind: Problem(parts[0].tasks, self.machine, self.options) for kind, parts in kinds.items()}
        done: dict[Hashable, tuple[Problem, layer.Streams]] = {}

        def solver(kind: Hashable, given: Mapping[str, int]) -> tuple[Problem, layer.Streams]:
            here = {group: given[group] for group in first[kind].groups if group is not None and group in given}
            key = (kind, *sorted(here.items()))
            if key not in done:
                problem = Problem(first[kind].tasks, self.machine, self.options, here)
                done[key] = problem, self._with_prefetches(problem, kinds[kind])
            return done[key]

        order = sorted(kinds, key=lambda kind: -len(kinds[kind]) * sum(first[kind].us))
        solved = homes.solve([(kind, len(kinds[kind])) for kind in order], homes.fixed(list(first.values())), solver,
                             self.options.threshold)
        self.problems = dict(solved.problems)
        self.streams = {kind: solved.streams[kind] for kind in kinds}

    def _with_prefetches(self, problem: Problem, there: list[Segment]) -> layer.Streams:
        """What `layer.streams` finds; for layers that follow their like, also its solution in graph order, which can
        leave longer windows for prefetches. Of the two, what is faster with prefetches and regions."""
        found = layer.streams(problem)
        options = self.options
        pairs = [(a, b) for a, b in itertools.pairwise(there) if b.first == a.first + len(a.tasks)]
        if len(pairs) < REPEATED or options.order == "graph" or options.pins.switch("prefetch") == "forbid":
            return found
        graph_order = dataclasses.replace(options, order="graph")
        other = layer.streams(Problem(problem.tasks, self.machine, graph_order, problem.homes))
        if other.solution == found.solution:
            return found
        first, then = (Problem(part.tasks, self.machine, options, problem.homes) for part in pairs[0])

        def us(one: layer.Streams) -> float:
            stretch = Stretch((first, one.solution), (then, one.solution), machine=self.machine)
            extra = layer.extras(stretch, self.fuser, self._why_not())
            return stretch.time(extra.fetches, extra.fused)

        return min(found, other, key=us)

    def _solved(self, part: Segment) -> tuple[Problem, Solution]:
        """The tasks of ``part`` with what was found for its kind."""
        return Problem(part.tasks, self.machine, self.options), self.streams[part.kind].solution

    def _why_not(self) -> str:
        return NO_FUSER if self.fuser is None else self.fuser.refusal or ""

    def _warm(self, extra: layer.Extras, size: int) -> tuple[tuple[int, int], ...]:
        """Bytes by task that ``extra`` prefetches for the layer after one of ``size`` tasks."""
        found: dict[int, int] = {}
        for fetch in extra.fetches:
            if fetch.target >= size:
                found[fetch.target - size] = found.get(fetch.target - size, 0) + fetch.bytes
        return tuple(sorted(found.items()))

    def plan(self) -> Plan:
        """Every layer placed as its kind was solved."""
        placed: list[Placement] = []
        waits: list[Wait] = []
        regions: list[SuperKernelRegion] = []
        previous: str | None = None
        for part, key in zip(self.parts, self.keys, strict=True):
            problem, found, extra = self.problems[part.kind], self.streams[part.kind], self.extras[key]
            here = assemble.placements(part, problem, found, extra)
            waits += assemble.waits(part, problem, found, previous)
            regions += assemble.regions(part, extra, self.fuser.options if self.fuser else "")
            previous = next((p.node for p in reversed(here) if p.stream == "main"), previous)
            placed += here
        streams = {p.node: p.stream for p in placed}
        fetches: dict[str, PlannedPrefetch] = {}
        for at, key in enumerate(self.keys):
            for fetch in assemble.fetches(self.parts, at, self.extras[key], streams):
                fetches.setdefault(fetch.weight, fetch)
        return Plan(self.options.target, tuple(placed), tuple(waits), tuple(fetches.values()), tuple(regions),
                    decisions=tuple(self._decisions()), pins=self.options.pins)

    def _decisions(self) -> list[Decision]:
        """What became of each feature in each distinct layer, then where SuperKernel regions are cut."""
        found: list[Decision] = []
        for kind, streams in self.streams.items():
            there = [part for part in self.parts if part.kind == kind]
            found += [assemble.decision("streams", there, streams.streams),
                      assemble.decision("core_limits", there, streams.limits)]
        for feature in ("prefetch", "super_kernel"):
            for key, extra in self.extras.items():
                there = [part for part, k in zip(self.parts, self.keys, strict=True) if k == key]
                found.append(assemble.decision(feature, there, getattr(extra, feature)))
        return found + self._stuck() + self._cuts()

    def _stuck(self) -> list[Decision]:
        """Kernels that stay on main where others move."""
        seen: dict[str, Decision] = {}
        for kind, streams in self.streams.items():
            if streams.solution.stream_count > 1:
                tasks = [task for task in self.problems[kind].tasks if task.name in self.options.cannot_wait]
                seen |= {label: Decision("streams", label, False, STUCK)
                         for label in (task.label or task.load.kernel for task in tasks)}
        return list(seen.values())

    def _cuts(self) -> list[Decision]:
        seen: dict[tuple[str, str], Decision] = {}
        for extra in self.extras.values():
            for cut in extra.cuts:
                label = cut.task.label or cut.task.load.kernel
                seen.setdefault((label, cut.reason), Decision("super_kernel", label, False, cut.reason))
        return list(seen.values())


def _seam(part: Segment, after: Segment) -> tuple[tuple[int, int], ...]:
    """Which tasks of ``after`` read results of ``part``, by place."""
    index = {task.name: i for i, task in enumerate(part.tasks)}
    return tuple((i, index[name]) for i, task in enumerate(after.tasks) for name in task.deps if name in index)


def _refuse_contradictions(pin: Pin, options: ScheduleOptions) -> None:
    """`PlanError` for a pin that asks for what is forbidden everywhere."""
    asked = {
        "streams": pin.stream not in (None, "main"),
        "core_limits": pin.cores not in (None, "whole"),
        "prefetch": pin.prefetch is True,
        "super_kernel": pin.super_kernel is True,
    }
    for feature, wanted in asked.items():
        if wanted and options.pins.switch(feature) == "forbid":
            raise PlanError(f"the pin of {pin.node} cannot be met: {feature} is forbidden; pin the other "
                            "kernels instead, or leave the pin out")


def _checked(work: _Work, graph: Schedule, machine: Machine, options: ScheduleOptions) -> Plan:
    """The plan of ``work`` with its times; the plan of one stream when that is faster and nothing is forced or pinned.
    """
    plan = work.plan()
    forced = [feature for feature in FEATURES if options.pins.switch(feature) == "force"]
    for feature in forced:
        if not any(d.applied for d in plan.decisions if d.feature == feature):
            reasons = sorted({d.reason for d in plan.decisions if d.feature == feature})
            raise PlanError(f"{feature} is forced, but possible nowhere: {'; '.join(reasons)}")
    tasks = {task.name: task for task in graph.tasks}
    cuts = {cut.task.name: cut.reason for extra in work.extras.values() for cut in extra.cuts}
    for pin in options.pins.nodes:
        if wrong := _missed(pin, plan, tasks[pin.node], cuts):
            raise PlanError(f"the pin of {pin.node} cannot be met: {wrong}")
    serial = simulate(graph.serial(), machine).step_us
    predicted = serial if plan.changes_nothing else simulate(to_schedule(plan, graph), machine).step_us
    if predicted > serial and not forced and not options.pins.nodes:
        lost = Decision("streams", "the whole graph", False, "no gain: the layers win by themselves, but together they "
                        f"take {predicted:.1f} us against {serial:.1f} us on one stream")
        plan = dataclasses.replace(serial_plan(graph, options.target), decisions=(lost,))
        predicted = serial
    return dataclasses.replace(plan, predicted_us=predicted, serial_us=serial,
                               lower_bound_us=bounds(graph, machine).us)


def _missed(pin: Pin, plan: Plan, task: Task, cuts: Mapping[str, str]) -> str:
    """What of ``pin`` of ``task`` does not hold in ``plan``. ``cuts`` {kernel: why it ends a SuperKernel region}."""
    placed = plan.by_node[pin.node]
    fetched = any(fetch.before == pin.node for fetch in plan.prefetches)
    if pin.stream is not None and placed.stream != pin.stream:
        return f"it is on {placed.stream}, not on {pin.stream}"
    if pin.cores is not None and placed.cores != (None if pin.cores == "whole" else pin.cores):
        return f"its core limit is {placed.cores}, not {pin.cores}"
    if pin.super_kernel is not None and (placed.super_kernel is not None) != pin.super_kernel:
        return _no_region(task, cuts) if pin.super_kernel else "it is in a SuperKernel region"
    if pin.prefetch is not None and fetched != pin.prefetch:
        return _no_prefetch(task) if pin.prefetch else "its weights are prefetched"
    return ""


def _no_region(task: Task, cuts: Mapping[str, str]) -> str:
    alone = "no kernel that fuses stands next to it in its stream under its core limit"
    return f"no SuperKernel region can hold it: {cuts.get(task.name, alone)}"


def _no_prefetch(task: Task) -> str:
    if not task.weights:
        return "it reads no weight"
    if task.load.kernel in UNKNOWN_WEIGHTS:
        return "which part of its weights it reads is not known before"
    return "no window is open for its weights"
