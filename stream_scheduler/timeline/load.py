"""How busy the chip is over time: cores and HBM as step functions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cannopy.stream_scheduler.simulator import Trace

_DIGITS = 4


@dataclass(frozen=True)
class Usage:
    """From ``start`` (microseconds) on: cube and vector cores in use, bytes per microsecond over HBM, of which
    ``prefetch`` are those of the prefetch engine."""

    start: float
    cube: int
    vector: int
    hbm: float
    prefetch: float


def usage(trace: Trace) -> list[Usage]:
    """The steps of ``trace`` in order of time; the last one has everything idle."""
    changes: defaultdict[float, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])

    def add(start: float, end: float, cube: int, vector: int, hbm: float, prefetch: float) -> None:
        for time, sign in ((start, 1), (end, -1)):
            at = changes[round(time, _DIGITS)]
            for i, value in enumerate((cube, vector, hbm, prefetch)):
                at[i] += sign * value

    for one in trace.intervals:
        if one.running and one.end > one.start:
            add(one.start, one.end, one.cube, one.vector, one.hbm_rate, 0.0)
    for fetch in trace.prefetches:
        if fetch.end > fetch.start:
            rate = fetch.bytes / (fetch.end - fetch.start)
            add(fetch.start, fetch.end, 0, 0, rate, rate)
    now = [0.0, 0.0, 0.0, 0.0]
    found: list[Usage] = []
    for time in sorted(changes):
        now = [value + change for value, change in zip(now, changes[time], strict=True)]
        step = Usage(time, round(now[0]), round(now[1]), max(0.0, now[2]), max(0.0, now[3]))
        if found and (step.cube, step.vector) == (found[-1].cube, found[-1].vector) and step.hbm == found[-1].hbm:
            continue
        found.append(step)
    return found
