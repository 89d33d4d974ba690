"""Pictures of a simulated schedule: a Perfetto trace and one self-contained HTML page."""

from cannopy.stream_scheduler.timeline.critical import critical_path
from cannopy.stream_scheduler.timeline.page import render
from cannopy.stream_scheduler.timeline.payload import payload
from cannopy.stream_scheduler.timeline.perfetto import perfetto
from cannopy.stream_scheduler.timeline.run import Run

__all__ = ["Run", "critical_path", "payload", "perfetto", "render"]
