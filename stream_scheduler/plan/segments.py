"""A schedule cut into layers, and which of them are the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cannopy.stream_scheduler.simulator import Task

LARGE = 24
"""Kernels that belong to no layer are cut into parts of at least so many, where one kernel stands between two parts."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tasks of one layer. ``kind`` is equal where the tasks cost the same and depend on each other in the
    same way, so that what is found for one holds for all."""

    layer: int | None
    first: int
    tasks: tuple[Task, ...]
    kind: Hashable

    @property
    def where(self) -> str:
        """Its place, for a reader."""
        ends = list(dict.fromkeys([self.tasks[0].name, self.tasks[-1].name]))
        return " to ".join(ends) if self.layer is None else str(self.layer)


def segments(tasks: Sequence[Task], special: frozenset[str] = frozenset(),
             marked: frozenset[str] = frozenset()) -> list[Segment]:
    """``tasks`` in graph order, cut where the layer changes. A kernel of no layer between two of one layer belongs to
    that layer. ``special`` names kernels that a user has pinned: a layer with one is of its own kind. Layers of one
    kind have their ``marked`` kernels at the same places."""
    layers = _filled([task.layer for task in tasks])
    starts = [i for i in range(len(tasks)) if i == 0 or layers[i] != layers[i - 1]]
    ends = [*starts[1:], len(tasks)]
    cuts = [cut for start, end in zip(starts, ends, strict=True) if layers[start] is None
            for cut in _narrow(tasks, start, end)]
    starts = sorted([*starts, *cuts])
    found = []
    for start, end in zip(starts, [*starts[1:], len(tasks)], strict=True):
        part = tuple(tasks[start:end])
        found.append(Segment(layers[start], start, part, _kind(part, special, marked)))
    return found


def _narrow(tasks: Sequence[Task], start: int, end: int) -> list[int]:
    """Places between ``start`` and ``end`` behind a kernel that needs all before it and that all behind it need."""
    index = {tasks[i].name: i - start for i in range(start, end)}
    needs: list[int] = []
    for i in range(start, end):
        mask = 0
        for name in tasks[i].deps:
            if name in index:
                mask |= needs[index[name]] | 1 << index[name]
        needs.append(mask)
    through = (1 << end - start) - 1
    cuts: list[int] = []
    gates = []
    for i in reversed(range(end - start)):
        if needs[i] == (1 << i) - 1 and through >> i & 1:
            gates.append(i)
        through &= needs[i] | ~((1 << i) - 1)
    for i in reversed(gates):
        last = cuts[-1] if cuts else start
        if start + i + 1 - last >= LARGE and end - (start + i + 1) >= LARGE:
            cuts.append(start + i + 1)
    return cuts


def _filled(layers: list[int | None]) -> list[int | None]:
    """A run of None between two equal layers becomes that layer."""
    found = list(layers)
    last = None
    for i, layer in enumerate(layers):
        if layer is None:
            continue
        if last is not None and layers[last] == layer:
            found[last:i] = [layer] * (i - last)
        last = i
    return found


def _kind(tasks: tuple[Task, ...], special: frozenset[str], marked: frozenset[str]) -> Hashable:
    index = {task.name: i for i, task in enumerate(tasks)}
    return tuple(
        (task.label, task.load, tuple(sorted(index[d] for d in task.deps if d in index)),
         tuple(w.bytes for w in task.weights), task.name if task.name in special else None, task.name in marked)
        for task in tasks
    )
