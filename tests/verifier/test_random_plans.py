"""Random plans that the verifier takes, run by the simulator at random times: nothing hangs, no core is given twice,
collectives of a group start in one order. The simulator shares no code with the verifier."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Placement, Plan, SuperKernelRegion, Wait, to_schedule
from cannopy.stream_scheduler.scheduler.costs import Scaled
from cannopy.stream_scheduler.simulator import Machine, Schedule, Trace, simulate
from cannopy.stream_scheduler.verifier.concurrency import gang_kernels
from cannopy.superkernel import why_not
from tests.scheduler.graphs import groups, random_graph, violations

CHIP = Machine.of(load_hardware("atlas-a3"), load_constants())
SPLITS = (((16, 32), (8, 16), (8, 16)), ((12, 24), (12, 24), (12, 24)), ((8, 16), (8, 16), (8, 16)))
NAMES = ("main", "s1", "s2")
REPAIRS = 60


def proposed(graph: Schedule, pick: random.Random) -> Plan:
    """Kernels in a random order on random streams, with random limits, waits and runs of kernels in regions."""
    left = {t.name: set(t.deps) for t in graph.tasks}
    order: list[str] = []
    while left:
        order.append(pick.choice([n for n, before in left.items() if not before]))
        del left[order[-1]]
        for before in left.values():
            before.discard(order[-1])
    split, sides, limits = pick.choice(SPLITS), pick.choice((0.1, 0.3, 0.5)), pick.choice((0, 0, 0.5, 1))
    placed: dict[str, Placement] = {}
    open_: dict[str, Placement] = {}
    kernels = {t.name: t.load.kernel for t in graph.tasks}
    for name in order:
        stream = pick.choice(NAMES) if pick.random() < sides else "main"
        cores = split[NAMES.index(stream)] if pick.random() < limits else None
        last, region = open_.get(stream), None
        if not why_not(kernels[name]) and pick.random() < 0.8:
            region = last.super_kernel if last and last.super_kernel and last.cores == cores else f"at_{name}"
        placed[name] = open_[stream] = Placement(name, stream, cores, region)
    waits = [Wait(n, order[pick.randrange(i)]) for i, n in enumerate(order) if i and pick.random() < 0.2]
    return _defined(tuple(placed.values()), tuple(waits))


def _defined(placed: tuple[Placement, ...], waits: tuple[Wait, ...]) -> Plan:
    names = dict.fromkeys(p.super_kernel for p in placed if p.super_kernel)
    return Plan("atlas-a3", placed, waits, regions=tuple(SuperKernelRegion(name) for name in names))


def accepted(graph: Schedule, pick: random.Random) -> Plan | None:
    """A proposed plan, changed where the verifier says so until it takes it."""
    plan = proposed(graph, pick)
    for _ in range(REPAIRS):
        wrong = violations(plan, graph)
        if not wrong:
            return plan
        nodes, placed = wrong[0].nodes, plan.by_node
        at = {p.node: i for i, p in enumerate(plan.placements)}
        split = {placed[n].super_kernel for n in nodes} - {None}
        if split and pick.random() < 0.7:
            rows = [dataclasses.replace(p, super_kernel=None) if p.super_kernel in split else p
                    for p in plan.placements]
            plan = _defined(tuple(rows), plan.waits)
        elif len(nodes) > 1 and wrong[0].check != "collective order" and at[nodes[0]] < at[nodes[1]] \
                and pick.random() < 0.6:
            plan = dataclasses.replace(plan, waits=(*plan.waits, Wait(nodes[1], nodes[0])))
        else:
            rows = [Placement(p.node) if p.node in nodes else p for p in plan.placements]
            plan = _defined(tuple(rows), plan.waits)
    return None


def overfull(plan: Plan, graph: Schedule, trace: Trace) -> list[str]:
    """Moments at which limits, or kernels that need all their cores at once, exceed the chip."""
    loads, found = {t.name: t.load for t in graph.tasks}, []
    for moment in sorted({span.start for span in trace.spans.values()}):
        now = [n for n, span in trace.spans.items() if span.start <= moment + 1e-9 and span.end > moment + 1e-6]
        running = [plan.by_node[n] for n in now]
        limits = [p.cores for p in running if p.cores is not None]
        gangs = [tuple(map(min, loads[p.node].cores, p.cores or (24, 48))) for p in running
                 if loads[p.node].kernel in gang_kernels()]
        for held in (limits, gangs):
            if any(sum(cores[i] for cores in held) > most for i, most in enumerate((24, 48))):
                found.append(f"{moment}: {[p.node for p in running]}")
    return found


@pytest.mark.parametrize("part", range(2))
def test_what_is_accepted_runs_at_any_times(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * 100, part * 100 + 100):
        graph, pick = random_graph(seed), random.Random(seed)
        plan = accepted(graph, pick)
        if plan is None or len(plan.streams) < 2:
            continue
        seen.update(plans=1, regions=bool(plan.regions), limits=any(p.cores for p in plan.placements))
        orders: dict[str, set[tuple[str, ...]]] = {}
        planned = to_schedule(plan, graph)
        for _ in range(4):
            loads = [Scaled(t.load, pick.choice((0.02, 0.3, 1.0, 3.0, 30.0))) for t in planned.tasks]
            trace = simulate(planned.replace([dataclasses.replace(t, load=load) for t, load
                                              in zip(planned.tasks, loads, strict=True)]), CHIP)  # no ScheduleError
            assert overfull(plan, graph, trace) == [], seed
            for name in set(groups(graph).values()):
                members = [n for n, group in groups(graph).items() if group == name]
                orders.setdefault(name, set()).add(tuple(sorted(members, key=lambda n: trace.spans[n].start)))
        assert all(len(found) == 1 for found in orders.values()), seed
    assert seen["plans"] >= 50  # otherwise nothing was tried
    assert min(seen["regions"], seen["limits"]) >= 10
