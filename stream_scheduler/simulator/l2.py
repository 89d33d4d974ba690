"""Which prefetched bytes are still in L2.

Everything that comes from HBM passes through L2 and pushes out what came first. Positions are counted in bytes filled
so far, so a line is resident while no more than the capacity has been filled after it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class L2:
    """``capacity`` in bytes. ``evicted``: prefetched bytes that were pushed out before anything read them."""

    capacity: float
    filled: float = 0.0
    evicted: float = 0.0
    _chunks: dict[str, list[tuple[float, float, float]]] = field(default_factory=lambda: defaultdict(list))

    def fill(self, total: float, weight: str | None = None, part: float = 0.0) -> None:
        """``total`` bytes come in, of which ``part`` belong to the prefetch of ``weight``, evenly spread."""
        start = self.filled
        self.filled += total
        if weight is not None and part > 0:
            self._chunks[weight].append((start, self.filled, part))

    def resident(self, weight: str) -> float:
        """Bytes of ``weight`` that a prefetch brought in and that are still there."""
        oldest = self.filled - self.capacity
        return sum(part * _after(oldest, start, end) for start, end, part in self._chunks.get(weight, ()))

    def take(self, weight: str) -> float:
        """Bytes of ``weight`` that its reader finds; the weight counts as read.

        A line that was pushed out has to be loaded again, which pushes out one that the reader has still to come to:
        a prefetch that is larger than the capacity loses twice what is over.
        """
        found = self.resident(weight)
        lost = sum(part for _, _, part in self._chunks.pop(weight, ())) - found
        self.evicted += lost
        return max(0.0, found - lost)


def _after(oldest: float, start: float, end: float) -> float:
    """Share of the interval that lies at or after ``oldest``."""
    if oldest <= start:
        return 1.0
    return (end - oldest) / (end - start) if oldest < end else 0.0
