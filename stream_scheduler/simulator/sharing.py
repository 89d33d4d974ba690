"""How concurrent readers divide the HBM bandwidth.

A kernel does not read all the time: its own start and what it computes in between leave the memory to others, but
while it reads it wants its peak rate. So each reader is given what is left when the others take their average rate,
at least its fair share, and only the part of its time in which it waits for memory grows. The averages fall as the
readers slow down, which a few rounds settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4


@dataclass(frozen=True)
class Reader:
    """``us`` alone, ``bytes`` over HBM meanwhile, ``load_us`` of that time waiting for memory, ``peak`` bytes per
    microsecond while it reads, ``weight``: bytes per microsecond that its cores could have in flight."""

    us: float
    bytes: float
    load_us: float
    peak: float
    weight: float


def speeds(readers: Sequence[Reader], total: float) -> list[float]:
    """Speed of each reader relative to having the memory of rate ``total`` to itself, in (0, 1]."""
    if sum(min(r.peak, total) for r in readers) <= total or len(readers) < 2:
        return [1.0] * len(readers)
    weights = [r.weight for r in readers]
    average = [r.bytes / r.us for r in readers]
    stretched = [r.us for r in readers]
    for _ in range(ROUNDS):
        for i, reader in enumerate(readers):
            peak = min(reader.peak, total)
            if peak <= 0 or reader.load_us <= 0:
                continue
            wanted = [peak if j == i else rate for j, rate in enumerate(average)]
            stretched[i] = reader.us + reader.load_us * (peak / divide(wanted, weights, total)[i] - 1)
            average[i] = reader.bytes / stretched[i]
    return [r.us / us for r, us in zip(readers, stretched, strict=True)]


def divide(wanted: Sequence[float], weights: Sequence[float], total: float) -> list[float]:
    """Weighted max-min fairness: ``total`` is divided by weight; what somebody does not want goes to the others."""
    if sum(wanted) <= total:
        return list(wanted)
    left, found = total, list(wanted)
    open_ = [i for i, demand in enumerate(wanted) if demand > 0]
    while open_:
        per_weight = left / sum(weights[i] for i in open_)
        content = [i for i in open_ if wanted[i] <= per_weight * weights[i]]
        if not content:
            for i in open_:
                found[i] = per_weight * weights[i]
            break
        left -= sum(wanted[i] for i in content)
        open_ = [i for i in open_ if i not in content]
    return found
