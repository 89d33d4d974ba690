"""A lowered graph as a schedule for the simulator: every operation mapped onto a kernel of the cost model."""

from cannopy.stream_scheduler.graph_cost.build import GraphSchedule, schedule_of

__all__ = ["GraphSchedule", "schedule_of"]
