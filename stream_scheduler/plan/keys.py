"""Names of layers and kernels in a plan file.

A part of the graph is named by its layer, ``7``; ``7.2`` is a second run of kernels of that layer, ``g1`` the first run
of kernels of no layer. Within a part a kernel is named by its operation, with its number where there are several:
``npu.npu_rms_norm#2``. ``next/…`` and ``previous/…`` are in the parts around, ``7/…`` in any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.model import PlanError
from cannopy.stream_scheduler.plan.segments import Segment, segments
from cannopy.stream_scheduler.simulator import Schedule, Task

NEXT, PREVIOUS = "next", "previous"
_LAYER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Part:
    """One part of the graph with the keys of its kernels."""

    name: str
    segment: Segment
    keys: dict[str, Task] = field(repr=False)


@dataclass
class Keys:
    """The parts of a graph, and every kernel's place in them."""

    parts: list[Part]
    place: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, schedule: Schedule) -> Keys:
        """The names of ``schedule``."""
        parts: list[Part] = []
        place: dict[str, tuple[int, str]] = {}
        seen: dict[int | None, int] = {}
        for number, segment in enumerate(segments(schedule.tasks)):
            count = seen[segment.layer] = seen.get(segment.layer, 0) + 1
            name = f"g{count}" if segment.layer is None else f"{segment.layer}" + (f".{count}" if count > 1 else "")
            keys = _keys(segment.tasks)
            parts.append(Part(name, segment, keys))
            place |= {task.name: (number, key) for key, task in keys.items()}
        return cls(parts, place)

    def refer(self, node: str, here: int) -> str:
        """How part number ``here`` calls kernel ``node``."""
        part, key = self.place[node]
        around = {0: "", 1: f"{NEXT}/", -1: f"{PREVIOUS}/"}
        return around.get(part - here, f"{self.parts[part].name}/") + key

    def find(self, text: str, here: int, where: str) -> Task:
        """The kernel that part number ``here`` calls ``text``; `PlanError` names the nearest."""
        prefix, slash, key = text.rpartition("/")
        part = here + {NEXT: 1, PREVIOUS: -1, "": 0}.get(prefix, 0)
        if slash and prefix not in (NEXT, PREVIOUS):
            part = self.number(prefix, where)
        if not 0 <= part < len(self.parts):
            raise PlanError(f"{where}: there is nothing {prefix} of {self.parts[here].name} for {text!r}")
        keys = self.parts[part].keys
        known(f"kernel of layer {self.parts[part].name}", key, keys, where)
        return keys[key]

    def number(self, name: str, where: str) -> int:
        """The number of the part called ``name``; `PlanError` names the nearest."""
        names = [part.name for part in self.parts]
        known("layer", name, names, where)
        return names.index(name)

    def numbers(self, text: object, where: str) -> list[int]:
        """Parts that ``0-2, 5, g1`` lists."""
        found: list[int] = []
        for piece in (p.strip() for p in str(text).split(",")):
            first, dash, last = piece.partition("-")
            if dash and _LAYER.fullmatch(first) and _LAYER.fullmatch(last):
                found += [self.number(str(n), where) for n in range(int(first), int(last) + 1)]
            else:
                found.append(self.number(piece, where))
        if not found or len(set(found)) != len(found):
            raise PlanError(f"{where}: expected layers, each once, found {text!r}")
        return found

    def text(self, numbers: Sequence[int]) -> str:
        """``0-2, 5, g1`` for part numbers; the inverse of `numbers`."""
        runs: list[list[int]] = []
        pieces = []
        for n in numbers:
            layer = self.parts[n].name
            if not _LAYER.fullmatch(layer):
                pieces.append(layer)
            elif runs and runs[-1][-1] == int(layer) - 1:
                runs[-1].append(int(layer))
            else:
                runs.append([int(layer)])
        return ", ".join([str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs] + pieces)


def region_prefix(segment: Segment) -> str:
    """What the names of the SuperKernel regions of ``segment`` begin with."""
    place = f"layer{segment.layer}" if segment.layer is not None else "graph"
    return f"{place}_at{segment.first}_"


def _keys(tasks: Sequence[Task]) -> dict[str, Task]:
    names = [task.label or task.load.kernel for task in tasks]
    count: dict[str, int] = {}
    keys = {}
    for name, task in zip(names, tasks, strict=True):
        count[name] = count.get(name, 0) + 1
        keys[f"{name}#{count[name]}" if names.count(name) > 1 else name] = task
    return keys
