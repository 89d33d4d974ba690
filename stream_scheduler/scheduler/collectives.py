"""Which kernels wait for other dies or for all their own cores, and in which group they talk.

Two collectives that run at the same time on one die must be in the same order on every die, or each may hold the cores
that the other one's partner needs. A group therefore stays on one stream. Kernels whose cores must all be there at once
run side by side only where both have room: on one stream, or under core limits that fit the chip together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from cannopy.fx_passes.parallel import kind_of
from cannopy.stream_scheduler.simulator import Schedule, Task

EXCHANGES = frozenset({"moe_dispatch", "moe_combine"})
RINGS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})
MEETING = frozenset({"moe_init_routing"})
"""Kernels whose own cores wait for each other: the sort of the routing."""

EVERYBODY = "the whole deployment"
_UNEVEN = "cp"
"""The kind of groups whose dies have graphs of other sizes each, and so other times: parts of a prompt."""


def group_of(task: Task, groups: Mapping[str, str]) -> str | None:
    """The communication group of ``task``, None when it is no collective. Collectives of no named group are taken to be
    of one."""
    if task.name in groups:
        return groups[task.name]
    return EVERYBODY if task.load.kernel in EXCHANGES | RINGS else None


def in_graph_order(graph: Schedule, groups: Mapping[str, str]) -> Schedule:
    """``graph`` in which a collective also waits for the one of its group before it: dies whose graphs take other times
    would be given other orders. Where dies differ by their layout, all collectives stand in one order."""
    together = any(kind_of(group) == _UNEVEN for group in groups.values())
    last: dict[str, str] = {}
    tasks = []
    for task in graph.tasks:
        group = groups.get(task.name)
        if group is not None:
            before = last.get(EVERYBODY if together else group)
            if before is not None and before not in task.deps:
                task = dataclasses.replace(task, deps=(*task.deps, before))
            last[EVERYBODY if together else group] = task.name
        tasks.append(task)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def meets(task: Task, groups: Mapping[str, str]) -> bool:
    """Whether all cores of ``task`` must be there at the same time."""
    return group_of(task, groups) is not None or task.load.kernel in MEETING


def groups_by_ranks(tasks: Iterable[Task]) -> dict[str, str]:
    """Groups of the collectives of a described network, whose layout has one group of each size beside the experts'."""
    found = {}
    for task in tasks:
        if task.load.kernel in EXCHANGES:
            found[task.name] = "experts"
        elif task.load.kernel in RINGS:
            sizes = getattr(getattr(task.load, "work", None), "sizes", {})
            found[task.name] = f"{sizes.get('ranks', 0):g} ranks"
    return found
