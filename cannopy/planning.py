"""The stage ``schedule``: a plan for the final graph, checked and written into it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cannopy import pipeline_text
from cannopy.errors import CannopyError
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.snapshot import Snapshot
from cannopy.options import Options
from cannopy.pipeline_text import Stage
from cannopy.stream_scheduler import emission, verifier
from cannopy.stream_scheduler.bounds import bounds
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.graph_cost import schedule_of
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.plan import Decision, Pins, Plan, PlanError, Switch, serial_plan, to_schedule
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule
from cannopy.stream_scheduler.simulator import Machine, Schedule, ScheduleError, simulate
from cannopy.stream_scheduler.timeline.details import details
from cannopy.stream_scheduler.timeline.payload import payload
from cannopy.stream_scheduler.timeline.run import Details, Run
from cannopy.superkernel import SuperKernels, why_not

logger = logging.getLogger("cannopy.planning")

STAGE = "schedule"
"""The stage of the pipeline."""

PLANNED = "planned"
"""Key of `Program.facts`: the `Planned` that was written into the graph."""

LESSER: tuple[Mapping[str, Switch], ...] = ({}, {"streams": "forbid"})
"""What is forbidden in the scheduler's first plan and in the one that is tried where that one cannot be used."""

SWITCHED = ("streams", "core_limits", "prefetch", "super_kernel")
"""Features that the stage's options switch by name; of ``streams`` a number is the budget."""


class PlanFileError(CannopyError):
    """A plan that cannot be read, does not fit the graph, or that the schedule verifier rejects."""


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from. ``schedule``: the kernels on one stream in graph order. ``unmapped``
    {operation: calls} were priced by their bytes. ``details`` of each kernel are for pictures. ``name`` of the plan:
    automatic, or its file."""

    plan: Plan
    schedule: Schedule
    machine: Machine
    unmapped: Mapping[str, int]
    details: Details = field(repr=False, default_factory=dict)
    name: str = "automatic"

    def runs(self) -> list[Run]:
        """The kernels on one stream and, where the plan changes anything, as planned; simulated."""
        serial = self.schedule.serial()
        found = [Run("serial", serial, simulate(serial, self.machine), self.details)]
        if not self.plan.changes_nothing:
            planned = to_schedule(self.plan, self.schedule)
            found.append(Run(self.name, planned, simulate(planned, self.machine), self.details))
        return found

    def picture(self) -> dict[str, Any] | None:
        """What a timeline page is drawn from, JSON-ready; None for a graph without a kernel."""
        if not self.schedule.tasks:
            return None
        return payload(self.runs(), self.machine, self.plan.lower_bound_us, self.plan.decisions)

    def report(self) -> dict[str, Any]:
        """The ``schedule`` part of a compile report, times in microseconds."""
        plan = self.plan
        limits = sorted({p.cores for p in plan.placements if p.cores is not None}, reverse=True)
        return {
            "streams": len(plan.streams), "core_limits": [f"c{cube}v{vector}" for cube, vector in limits],
            "prefetches": len(plan.prefetches), "super_kernels": len(plan.regions), "predicted_us": plan.predicted_us,
            "lower_bound_us": plan.lower_bound_us, "serial_us": plan.serial_us,
            "decisions": [
                {"feature": d.feature, "where": d.where, "applied": d.applied, "gain_us": d.gain_us,
                 "worst_gain_us": d.worst_gain_us, "reason": d.reason} for d in plan.decisions
            ],
        }


def run(program: Program, stage: Stage, target: str, plan_file: Path | None) -> int:
    """Plan the graph of ``program`` and write the plan into it; the number of nodes added.

    ``program.facts[PLANNED]`` has the `Planned` afterwards. Raises `PlanFileError` for the plan of a user.
    """
    before = Snapshot(program)
    dropped: list[Decision] = []
    while True:
        planned = make(program, stage, target, plan_file, dropped)
        try:
            added = emission.write(program, planned.plan)
        except PlanError as error:
            if plan_file is not None:
                raise PlanFileError(f"{plan_file}: {_located(str(error), plan_file, planned.schedule)}") from None
            before.restore(program)
            dropped.append(_dropped(f"it cannot be written: {error}"))
            continue
        program.facts[PLANNED] = planned
        return len(program.gm.graph.nodes) if dropped else added  # a restored graph has other nodes


def make(program: Program, stage: Stage, target: str, plan_file: Path | None = None,
         dropped: list[Decision] | None = None) -> Planned:
    """The plan of ``program`` on ``target``; the graph is not changed.

    A plan file that says where every kernel runs is taken as it is; one with pins only is completed. What the verifier
    rejects is an error when a file asked for it. A plan of the scheduler's own that is rejected is dropped for a lesser
    one: one stream with prefetches and SuperKernel regions, then one stream alone. The reason is among the decisions.
    ``dropped``: the decisions against plans of the scheduler so far, of which each stands for one; gets more.
    """
    hardware = load_hardware(target)
    found = schedule_of(program, pricing := Pricing(hardware, load_constants()))
    facts = verifier.facts_of(program)
    machine = Machine.of(hardware, pricing.constants)
    plan = _read(plan_file, found.schedule, target) if plan_file else None

    def rejected(plan: Plan) -> list[str]:
        return [str(v) for v in verifier.verify_plan(plan, found.schedule, hardware, facts, _eligible)]

    if plan is None or not plan.complete:
        options = options_of(stage, target, plan.pins if plan else None, facts.groups)
        options = replace(options, sizes=facts.sizes, cannot_wait=emission.cannot_wait(program))
        fuser = SuperKernels(hardware.family)
        if plan_file:
            plan = _asked_for(found.schedule, machine, options, fuser, plan_file)
        else:
            plan = _automatic(found.schedule, machine, options, fuser, rejected, [] if dropped is None else dropped)
    if plan_file and (wrong := rejected(plan)):
        reasons = "\n".join(f"  {_located(text, plan_file, found.schedule)}" for text in wrong[:10])
        raise PlanFileError(f"{plan_file} is rejected:\n{reasons}", "correct the plan, or leave --plan out")
    try:
        plan = _timed(plan, found.schedule, machine)
    except ScheduleError as error:
        raise PlanFileError(f"{plan_file or 'pipeline, stage schedule'}: {error}") from None
    return Planned(plan, found.schedule, machine, found.unmapped, details(program.gm.graph),
                   plan_file.name if plan_file else "automatic")


def _asked_for(graph: Schedule, machine: Machine, options: ScheduleOptions, fuser: SuperKernels,
               plan_file: Path | None) -> Plan:
    """The scheduler's plan; what it cannot do is an error, in the lines of ``plan_file``."""
    try:
        return schedule(graph, machine, options, fuser)
    except (PlanError, ScheduleError) as error:
        text = _located(str(error), plan_file, graph) if plan_file else str(error)
        raise PlanFileError(f"{plan_file or 'pipeline, stage schedule'}: {text}") from None


def _automatic(graph: Schedule, machine: Machine, options: ScheduleOptions, fuser: SuperKernels,
               rejected: Callable[[Plan], list[str]], dropped: list[Decision]) -> Plan:
    """The first of the scheduler's plans, each less than the one before, that can be made and is not ``rejected``; as
    many as were ``dropped`` are left out. What is forced by name and possible nowhere is an error."""
    for less in LESSER[len(dropped):]:
        features = {**options.pins.features, **less}
        asked = replace(options, pins=replace(options.pins, features=features))
        try:
            if not less and "force" in features.values():
                plan = _asked_for(graph, machine, asked, fuser, None)
            else:
                plan = schedule(graph, machine, asked, fuser)
        except (PlanError, ScheduleError) as error:
            dropped.append(_dropped(f"it cannot be made: {error}"))
            continue
        wrong = rejected(plan)
        if not wrong:
            return replace(plan, decisions=(*dropped, *plan.decisions))
        dropped.append(_dropped(f"rejected by the schedule verifier: {wrong[0]}"))
    return replace(serial_plan(graph, options.target), decisions=tuple(dropped))


def _dropped(why: str) -> Decision:
    logger.warning("a plan of the scheduler is not used: %s", why)
    return Decision("streams", "the whole graph", False, f"the plan is not used, a lesser one is: {why}")


def without(options: Options) -> Options:
    """``options`` with no stage ``schedule`` in the pipeline."""
    stages = pipeline_text.parse(options.pipeline).stages
    return replace(options, pipeline=str(pipeline_text.Pipeline(tuple(s for s in stages if s.name != STAGE))))


def dropped(reason: str) -> dict[str, Any]:
    """The decision not to use the scheduler's plan, as it stands in a report."""
    return {"feature": "streams", "where": "the whole graph", "applied": False, "gain_us": None, "worst_gain_us": None,
            "reason": reason}


def options_of(stage: Stage, target: str, pins: Pins | None, groups: Mapping[str, str]) -> ScheduleOptions:
    """The scheduler's options of a stage ``schedule{streams=2,prefetch=forbid}``. ``pins`` of a plan file are added;
    the text's switches stand over the file's."""
    given = dict(stage.options)
    budget = given.get("streams", "auto")
    switches: dict[str, Switch] = dict(pins.features) if pins else {}
    switches |= {name: cast("Switch", given[name]) for name in SWITCHED if name in given and not given[name].isdigit()}
    more: dict[str, Any] = {"streams": int(budget)} if budget.isdigit() else {}
    if "threshold" in given:
        more["threshold"] = float(given["threshold"])
    return ScheduleOptions(target=target, groups=groups, pins=Pins(switches, pins.nodes if pins else ()), **more)


def _eligible(kernel: str) -> str:
    return why_not(kernel) or ""


def _read(file: Path, graph: Schedule, target: str) -> Plan:
    from cannopy.stream_scheduler.plan.text import from_yaml

    try:
        plan = from_yaml(file.read_text(encoding="utf-8"), graph)
    except OSError as error:
        raise PlanFileError(f"{file}: {error.strerror or error}") from None
    except (PlanError, UnicodeDecodeError) as error:
        raise PlanFileError(f"{file}: {error}") from None
    if plan.target != target:
        raise PlanFileError(f"{file} is for {plan.target}, and the target is {target}", f"--target {plan.target}")
    return replace(plan, predicted_us=None, serial_us=None, lower_bound_us=None)  # of the plan before it was edited


def _located(text: str, file: Path, graph: Schedule) -> str:
    """``text`` about kernels, followed by the lines of ``file`` that they stand in."""
    from cannopy.stream_scheduler.plan.text import places

    found = places(file.read_text(encoding="utf-8"), graph)
    named = dict.fromkeys(word for word in re.findall(r"\w+(?:\.\w+)*", text) if word in found)
    return f"{text}\n    " + "\n    ".join(f"{n}: {found[n]}" for n in named) if named else text


def _timed(plan: Plan, graph: Schedule, machine: Machine) -> Plan:
    """``plan`` with its predicted times, where it does not have them."""
    if plan.predicted_us is not None and plan.serial_us is not None and plan.lower_bound_us is not None:
        return plan
    serial = simulate(graph.serial(), machine).step_us
    own = serial if plan.changes_nothing else simulate(to_schedule(plan, graph), machine).step_us
    return replace(plan, predicted_us=own, serial_us=serial, lower_bound_us=bounds(graph, machine).us)
