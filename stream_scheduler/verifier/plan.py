"""The checks of a plan, in the order in which they make sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.hardware import Hardware
from cannopy.stream_scheduler.plan.model import MAX_STREAMS, Plan
from cannopy.stream_scheduler.simulator import Schedule
from cannopy.stream_scheduler.verifier.concurrency import collectives, core_limits, gangs, hazards, joined
from cannopy.stream_scheduler.verifier.facts import GraphFacts
from cannopy.stream_scheduler.verifier.fetches import prefetches
from cannopy.stream_scheduler.verifier.order import Order
from cannopy.stream_scheduler.verifier.regions import super_kernels
from cannopy.stream_scheduler.verifier.violation import Subject, Violation

Eligible = Callable[[str], str]
"""kernel → "" when it can be inside a SuperKernel, else why not."""


def verify_plan(plan: Plan, schedule: Schedule, hardware: Hardware, facts: GraphFacts,
                eligible: Eligible | None = None) -> list[Violation]:
    """Everything that is wrong with ``plan``; empty when it cannot race, hang or be refused.

    Args:
        plan: a complete plan.
        schedule: the kernels of the graph with their data dependencies; streams and limits in it are not looked at.
        hardware: the die; ``plan.target`` names it.
        facts: of the graph, `facts_of`.
        eligible: whether a kernel can be inside a SuperKernel; None takes every kernel.
    """
    tasks = {task.name: task for task in schedule.tasks}
    found = _names(plan, tasks) or _order(plan, {name: task.deps for name, task in tasks.items()})
    if found:
        return found  # nothing else can be said of kernels that are not there, or of an order that cannot be
    deps = {name: task.deps for name, task in tasks.items()}
    subject = Subject(plan, tasks, hardware, facts, Order(plan.placements, deps, plan.waits), plan.by_node)
    if len(plan.streams) > MAX_STREAMS:
        extra = next(p.node for p in plan.placements if p.stream == plan.streams[MAX_STREAMS])
        found.append(Violation("streams", (extra,), f"{len(plan.streams)} streams ({', '.join(plan.streams)}), the "
                               f"last one first for {extra}; a graph has at most {MAX_STREAMS}"))
    for check in (core_limits, gangs, collectives, hazards, joined, prefetches):
        found += check(subject)
    return found + super_kernels(subject, eligible)


def _names(plan: Plan, tasks: Mapping[str, object]) -> list[Violation]:
    """Every kernel is placed once, and nothing else is named."""
    counts = Counter(p.node for p in plan.placements)
    found = [Violation("kernels", (name,), f"{name} is placed {count} times; expected once")
             for name, count in counts.items() if count > 1]
    found += [Violation("kernels", (name,), f"{name} is not placed") for name in tasks if name not in counts]
    named = [*counts, *(n for w in plan.waits for n in (w.node, w.on)),
             *(n for f in plan.prefetches for n in (f.after, f.before))]
    found += [Violation("kernels", (name,), f"the graph has no kernel {name}")
              for name in dict.fromkeys(named) if name not in tasks]
    return found


def _order(plan: Plan, deps: Mapping[str, tuple[str, ...]]) -> list[Violation]:
    """Nothing comes before what it reads or waits for, so there is no cycle."""
    position = {p.node: i for i, p in enumerate(plan.placements)}
    found = [Violation("order", (node, name), f"{node} reads {name} and is placed before it")
             for node in position for name in deps[node] if position[name] >= position[node]]
    found += [Violation("order", (w.node, w.on), f"{w.node} waits for {w.on}, which is "
                        + ("itself" if w.node == w.on else "placed behind it: neither would start"))
              for w in plan.waits if position[w.on] >= position[w.node]]
    return found
