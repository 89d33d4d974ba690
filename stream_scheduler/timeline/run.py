"""One simulated schedule with what a reader wants to know about its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cannopy.stream_scheduler.simulator import Schedule, Trace

Details = Mapping[str, Mapping[str, str]]
"""{task: {what: text}}: shapes, source line, rule; shown as they are."""


@dataclass(frozen=True)
class Run:
    """``name``: serial, expert, automatic, or what a plan file is called. ``details`` may lack tasks."""

    name: str
    schedule: Schedule
    trace: Trace
    details: Details = field(default_factory=dict)
