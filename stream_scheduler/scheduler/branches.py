"""Branches that fork from the longest chain of a layer and join it again, each as a whole on a side stream."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.stream_scheduler.scheduler.problem import Problem, Solution


@dataclass(frozen=True)
class Branch:
    """Tasks of a side branch by index, in graph order; ``us``: microseconds one after the other."""

    tasks: tuple[int, ...]
    us: float


def branches(problem: Problem) -> list[Branch]:
    """What is left of the layer without its longest chain, in connected parts, longest first. What nothing reads
    belongs to the main stream and is left out."""
    chain = set(problem.chain)
    left = [i for i in range(problem.size) if i not in chain and problem.succs[i]]
    part = {i: i for i in left}

    def root(i: int) -> int:
        while part[i] != i:
            part[i] = part[part[i]]
            i = part[i]
        return i

    for i in left:
        for j in problem.preds[i]:
            if j in part:
                part[root(i)] = root(j)
    groups: dict[int, list[int]] = {}
    for i in left:
        groups.setdefault(root(i), []).append(i)
    found = [Branch(tuple(group), sum(problem.us[i] for i in group)) for group in groups.values()]
    return sorted(found, key=lambda b: (-b.us, b.tasks))


def assigned(problem: Problem, chosen: dict[int, int], graph_order: bool) -> Solution:
    """The tasks ``chosen`` {task: stream} on their side streams, the others on main. In each stream the kernel with
    the longest chain behind it comes first."""
    streams = []
    for i in range(problem.size):
        allowed = problem.streams_of(i, max([1, *(s + 1 for s in chosen.values())]), True)
        wanted = chosen.get(i, 0)
        streams.append(wanted if wanted in allowed else allowed[0])
    order = tuple(range(problem.size)) if graph_order else by_tail(problem)
    return problem.pinned(Solution(order, tuple(streams), (None,) * problem.size))


def by_tail(problem: Problem) -> tuple[int, ...]:
    """A topological order that takes the task with the longest chain behind it of those that are ready."""
    missing = [len(before) for before in problem.preds]
    ready = [i for i in range(problem.size) if not missing[i]]
    order = []
    while ready:
        i = max(ready, key=lambda i: (problem.tails[i], -i))
        ready.remove(i)
        order.append(i)
        for j in problem.succs[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    return tuple(order)
