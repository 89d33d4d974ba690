"""The estimate of one step: time, bounds, table of kernels, memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cannopy.stream_scheduler.bounds import Bounds, bounds
from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.hardware import Hardware
from cannopy.stream_scheduler.network.builder import Scene
from cannopy.stream_scheduler.network.memory import Memory, memory
from cannopy.stream_scheduler.network.model import Model
from cannopy.stream_scheduler.network.pricing import PricedKernel, Pricing
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation, split_cores
from cannopy.stream_scheduler.network.step import build
from cannopy.stream_scheduler.simulator import Machine, Schedule, Span, Trace, simulate


@dataclass(frozen=True)
class Row:
    """All calls of one kernel for one purpose: total microseconds, bytes and FLOPs of the step, and what bounds it."""

    label: str
    kernel: str
    count: int
    us: float
    bytes: float
    flops: float
    bound: str
    share: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in Row.__dataclass_fields__}


@dataclass(frozen=True)
class StepEstimate:
    """What one step takes."""

    schedule: Schedule
    machine: Machine
    trace: Trace

    @cached_property
    def bounds(self) -> Bounds:
        """Times that no schedule of these kernels beats."""
        return bounds(self.schedule, self.machine)

    @cached_property
    def serial_us(self) -> float:
        """The same kernels on one stream without core limits, prefetch and SuperKernel."""
        serial = self.schedule.serial()
        return self.us if serial == self.schedule else simulate(serial, self.machine).step_us

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The kernels by purpose, most time first."""
        return _rows(self.trace.spans.values())

    @property
    def us(self) -> float:
        """Predicted step time: device time and graph launches."""
        return self.trace.step_us

    def tpot_us(self, accepted: float) -> float:
        """Time per output token when each step accepts ``accepted`` drafts on average."""
        return self.us / (1 + accepted)


def placement_of(model: Model, hardware: Hardware, plan: str) -> Placement:
    """``serial``: one stream. ``expert``: as the published model of the family is placed by hand on Ascend."""
    if plan == "serial":
        return Placement()
    if model.family != "longcat":
        return Placement(side_stream=True)
    main, side = split_cores(hardware.cube_cores, hardware.vector_cores)
    return Placement(True, main, side, prefetch=True, super_kernel=True)


def estimate_step(model: Model, load: Load, parallel: Parallel, quant: Quantisation, hardware: Hardware,
                  placement: Placement | None = None, constants: Constants | None = None) -> StepEstimate:
    """Predict one step. Without ``placement``: one stream. `setting.SettingError` for a layout that does not fit."""
    constants = constants or load_constants()
    pricing = Pricing(hardware, constants)
    schedule = build(model, load, parallel, quant, placement or Placement(), pricing)
    return estimate_schedule(schedule, Machine.of(hardware, constants))


def estimate_schedule(schedule: Schedule, machine: Machine) -> StepEstimate:
    """Simulate ``schedule``."""
    return StepEstimate(schedule, machine, simulate(schedule, machine))


def estimate_memory(model: Model, load: Load, parallel: Parallel, quant: Quantisation, hardware: Hardware,
                    constants: Constants | None = None) -> Memory:
    """Memory of one die for the same arguments."""
    return memory(Scene(model, load, parallel, quant), hardware.hbm_bytes, constants or load_constants())


def _rows(spans: Iterable[Span]) -> tuple[Row, ...]:
    """By label and kernel, most time first."""
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.task.label or span.task.load.kernel, span.task.load.kernel), []).append(span)
    total = sum(span.us for group in groups.values() for span in group) or 1.0
    rows = []
    for (label, kernel), group in groups.items():
        us = sum(span.us for span in group)
        works = [span.task.load.work for span in group if isinstance(span.task.load, PricedKernel)]
        longest = max(group, key=lambda span: span.us)
        rows.append(Row(label, kernel, len(group), us, sum(w.bytes for w in works), sum(w.flops for w in works),
                        longest.bound, us / total))
    return tuple(sorted(rows, key=lambda row: -row.us))
