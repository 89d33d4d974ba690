"""What a user may choose about scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from cannopy.stream_scheduler.plan import FEATURES, SWITCHES, Pins, PlanError
from cannopy.stream_scheduler.plan.apply import known
from cannopy.stream_scheduler.plan.model import MAX_STREAMS


@dataclass(frozen=True)
class ScheduleOptions:
    """``target``: name of the chip, for the plan. ``streams``: budget, 1 to 4. A feature is applied in a layer where it
    wins more than ``threshold``, a share of the time of the layer, and more than ``least_us`` microseconds, which an
    event and a wait may cost. ``split``: core limits are searched, or always halves. ``order``: kernels are reordered,
    or stay in graph order. ``groups`` {collective: communication group}; see `collectives`. ``sizes`` {weight: bytes of
    the tensor}, beyond which nothing is prefetched; what a kernel reads may be counted as more. ``cannot_wait``:
    kernels on which no wait can be put, because they read weights and caches only; they stay on the main stream.
    ``pins``: switches of features and fixed kernels."""

    target: str = ""
    streams: int = 2
    threshold: float = 0.005
    least_us: float = 2.0
    split: Literal["search", "half"] = "search"
    order: Literal["search", "graph"] = "search"
    groups: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    cannot_wait: frozenset[str] = frozenset()
    pins: Pins = field(default_factory=Pins)

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= MAX_STREAMS:
            raise PlanError(f"streams: expected 1 to {MAX_STREAMS}, found {self.streams}")
        if not 0 <= self.threshold < 1:
            raise PlanError(f"threshold: expected a share of the time from 0 to below 1, found {self.threshold!r}")
        for feature, switch in self.pins.features.items():
            known("feature", feature, FEATURES)
            known(f"switch of {feature}", switch, SWITCHES)
