"""Predicted times of a compiled graph, for the report."""

from __future__ import annotations

from cannopy.fx_passes.program import Program
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.graph_cost import schedule_of
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.report import StepEstimate, estimate_schedule
from cannopy.stream_scheduler.simulator import Machine


def predict(program: Program, target: str) -> tuple[StepEstimate, dict[str, int]]:
    """The estimate of one call of ``program`` on ``target``, and {operation: calls} that were priced by their bytes
    because no formula describes them."""
    hardware, constants = load_hardware(target), load_constants()
    found = schedule_of(program, Pricing(hardware, constants))
    return estimate_schedule(found.schedule, Machine.of(hardware, constants)), found.unmapped


def times(step: StepEstimate) -> dict[str, float]:
    """The keys of ``CompileReport.schedule`` that are times, in microseconds."""
    return {"predicted_us": step.us, "lower_bound_us": step.bounds.us, "serial_us": step.serial_us}
