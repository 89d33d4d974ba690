"""Streams, core limits, prefetch and SuperKernel regions from the cost model.

    segments, problem    a graph as distinct layers, each a problem of precedence, durations and core pools
    listing, branches    candidates: lists over streams, branches on streams of their own
    windows, splits      core limits where streams run side by side
    stretch, prefetch    a layer and the next one; weights into L2
    fusing               SuperKernel regions
    costs, gates         what a choice has to win, also where costs are wrong
    layer, assemble, build   the plan
"""

from cannopy.stream_scheduler.scheduler.build import schedule
from cannopy.stream_scheduler.scheduler.fusing import Cut, Fuser, Runs
from cannopy.stream_scheduler.scheduler.options import ScheduleOptions

__all__ = ["Cut", "Fuser", "Runs", "ScheduleOptions", "schedule"]
