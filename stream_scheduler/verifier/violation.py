"""What a check says, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from cannopy.stream_scheduler.hardware import Hardware
from cannopy.stream_scheduler.plan.model import Placement, Plan
from cannopy.stream_scheduler.simulator import Task
from cannopy.stream_scheduler.verifier.facts import GraphFacts
from cannopy.stream_scheduler.verifier.order import Order


@dataclass(frozen=True)
class Violation:
    """``check`` failed at ``nodes`` (kernels of the plan); ``reason`` has what was expected, what was found and, where
    there is one, the way out."""

    check: str
    nodes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}"


@dataclass(frozen=True)
class Subject:
    """A plan with every name known, and what it is about. ``order`` is what must have ended before what."""

    plan: Plan
    tasks: dict[str, Task]
    hardware: Hardware
    facts: GraphFacts
    order: Order
    placements: dict[str, Placement] = field(default_factory=dict)

    def kernel(self, node: str) -> str:
        """Name of the kernel of ``node`` in the cost model."""
        return self.tasks[node].load.kernel

    def cores(self, node: str) -> tuple[int, int]:
        """Cube and vector cores that ``node`` can hold at most: its limit, or what it takes of the whole chip."""
        limit, natural = self.placements[node].cores, self.tasks[node].load.cores
        if limit is None:
            return natural
        return min(limit[0], natural[0]), min(limit[1], natural[1])
