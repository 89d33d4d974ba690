"""Discrete-event simulator of scheduled graphs on one Ascend die."""

from cannopy.stream_scheduler.simulator.engine import duration, simulate
from cannopy.stream_scheduler.simulator.machine import Machine
from cannopy.stream_scheduler.simulator.queues import ScheduleError
from cannopy.stream_scheduler.simulator.schedule import Load, Prefetch, Profile, Schedule, Task, Weight
from cannopy.stream_scheduler.simulator.trace import Interval, PrefetchSpan, Span, Trace

__all__ = [
    "Interval", "Load", "Machine", "Prefetch", "PrefetchSpan", "Profile", "Schedule", "ScheduleError", "Span", "Task",
    "Trace", "Weight", "duration", "simulate",
]
