"""What a simulation gave: when each task ran, on what, and what held it up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cannopy.stream_scheduler.simulator.schedule import Task


@dataclass(frozen=True)
class Interval:
    """A stretch of time of one task in its stream.

    ``bound``: cube, vector, hbm, l2 or link while it runs; launch before it starts (gap, or barrier in a SuperKernel)
    and while its fixed time is the longest part; event while it waits for another stream, cores while it waits for
    cores. ``hbm_rate`` in bytes per microsecond.
    """

    task: str
    stream: str
    start: float
    end: float
    bound: str
    running: bool
    cube: int = 0
    vector: int = 0
    hbm_rate: float = 0.0


@dataclass(frozen=True)
class Span:
    """When ``task`` ran, in microseconds, the bytes it moved over HBM and the bytes it found in L2."""

    task: Task
    start: float
    end: float
    bound: str
    alone_us: float
    hbm_bytes: float
    resident_bytes: float

    @property
    def us(self) -> float:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True)
class PrefetchSpan:
    """When a prefetch ran, after which task, and how many of its bytes were found in L2 by the kernel that wanted them.
    """

    weight: str
    start: float
    end: float
    bytes: float
    used: float
    after: str


@dataclass
class Trace:
    """The result of one simulation.

    ``us``: device time from the first launch to the end of the last task. ``host_us``: graph launches that the device
    waits for. ``evicted_bytes``: prefetched bytes pushed out of L2 before use.
    """

    us: float = 0.0
    host_us: float = 0.0
    spans: dict[str, Span] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    prefetches: list[PrefetchSpan] = field(default_factory=list)
    evicted_bytes: float = 0.0

    @property
    def step_us(self) -> float:
        """Device time and graph launches."""
        return self.us + self.host_us

    def of_stream(self, stream: str) -> Iterator[Span]:
        """Spans of one stream in order."""
        return (span for span in self.spans.values() if span.task.stream == stream)

    def streams(self) -> list[str]:
        """Names of the streams in order of first use."""
        return list(dict.fromkeys(span.task.stream for span in self.spans.values()))

    def bound_us(self) -> dict[str, float]:
        """Microseconds by bound, over all streams, longest first."""
        found: dict[str, float] = {}
        for interval in self.intervals:
            found[interval.bound] = found.get(interval.bound, 0.0) + interval.end - interval.start
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: every interval and prefetch."""
        return {
            "us": self.us,
            "host_us": self.host_us,
            "evicted_bytes": self.evicted_bytes,
            "intervals": [
                {k: getattr(i, k) for k in Interval.__dataclass_fields__} for i in self.intervals
            ],
            "prefetches": [
                {k: getattr(p, k) for k in PrefetchSpan.__dataclass_fields__} for p in self.prefetches
            ],
        }
