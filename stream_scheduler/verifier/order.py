"""What must have ended before what, under a plan: data, waits, and the order within each stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cannopy.stream_scheduler.plan.model import Placement, Wait


class Order:
    """Happens-before over the kernels of a plan in the order of ``placements``, as one bit set per kernel.

    Edges that point backwards in that order are left out here; they are violations of their own.
    """

    def __init__(self, placements: Sequence[Placement], deps: Mapping[str, Sequence[str]],
                 waits: Sequence[Wait]) -> None:
        self.position = {p.node: i for i, p in enumerate(placements)}
        self.names = [p.node for p in placements]
        self.before: list[int] = []
        self.in_stream: dict[str, int] = {}
        waited: dict[str, list[str]] = {}
        for wait in waits:
            waited.setdefault(wait.node, []).append(wait.on)
        last: dict[str, int] = {}
        for i, placement in enumerate(placements):
            earlier = [self.position[n] for n in (*deps.get(placement.node, ()), *waited.get(placement.node, ()))]
            earlier += [last[placement.stream]] if placement.stream in last else []
            reached = 0
            for j in earlier:
                if j < i:
                    reached |= self.before[j] | 1 << j
            self.before.append(reached)
            last[placement.stream] = i
            self.in_stream[placement.stream] = self.in_stream.get(placement.stream, 0) | 1 << i

    def ends_before(self, first: str, then: str) -> bool:
        """Whether ``first`` has ended before ``then`` starts, whatever the times."""
        return bool(self.before[self.position[then]] >> self.position[first] & 1)

    def concurrent(self, node: str, among: int) -> int:
        """Those of the bit set ``among``, later in the order than ``node``, that can run at the same time."""
        i = self.position[node]
        found, rest = 0, among & ~((1 << i + 1) - 1)
        while rest:
            bit = rest & -rest
            if not self.before[bit.bit_length() - 1] >> i & 1:
                found |= bit
            rest ^= bit
        return found
