"""Plans: streams, order, core limits, prefetches and SuperKernel regions of one graph, as data and as a file."""

from cannopy.stream_scheduler.plan.apply import serial_plan, to_schedule
from cannopy.stream_scheduler.plan.invert import from_schedule
from cannopy.stream_scheduler.plan.model import (
    FEATURES,
    SWITCHES,
    Cores,
    Decision,
    Pin,
    Pins,
    Placement,
    Plan,
    PlanError,
    PlannedPrefetch,
    SuperKernelRegion,
    Switch,
    Wait,
)

__all__ = [
    "FEATURES", "SWITCHES", "Cores", "Decision", "Pin", "Pins", "Placement", "Plan", "PlanError", "PlannedPrefetch",
    "SuperKernelRegion", "Switch", "Wait", "from_schedule", "serial_plan", "to_schedule",
]
