"""A plan: where each kernel of a graph runs, in which order, and what is fetched and fused on the way.

A plan is plain data. It names kernels as the graph does (`simulator.Task.name`, which is the name of the FX node), so
that it can be simulated, verified and emitted without the scheduler that made it. Its file form is in `text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from cannopy.stream_scheduler.simulator.schedule import MAIN

Cores = tuple[int, int]
"""Cube and vector cores."""

Switch = Literal["auto", "force", "forbid"]
"""``auto``: applied where it gains enough. ``force``: applied wherever it is possible. ``forbid``: never."""

SWITCHES: tuple[Switch, ...] = ("auto", "force", "forbid")
FEATURES = ("streams", "core_limits", "prefetch", "super_kernel")

MAX_STREAMS = 4
"""Streams of one graph. Measured splits use two, expert-written models at most three; one more for prefetch-like
work is as far as any published plan goes."""


class PlanError(ValueError):
    """A plan that does not fit its graph or its own rules; says what was found and what would fit."""


@dataclass(frozen=True)
class Placement:
    """Kernel ``node`` runs in ``stream`` on at most ``cores`` (None: the whole chip), inside the SuperKernel region
    ``super_kernel`` (None: in none)."""

    node: str
    stream: str = MAIN
    cores: Cores | None = None
    super_kernel: str | None = None


@dataclass(frozen=True)
class Wait:
    """``node`` starts only when ``on`` has ended, though no data flows between them (`npu_wait_tensor`)."""

    node: str
    on: str


@dataclass(frozen=True)
class PlannedPrefetch:
    """The first ``bytes`` of weight ``weight`` go into L2 from when kernel ``after`` has ended (`npu_prefetch` with its
    output as the dependency), for kernel ``before``. ``stream`` is where the prefetch is issued: that of ``after``."""

    weight: str
    bytes: int
    after: str
    before: str
    stream: str = MAIN


@dataclass(frozen=True)
class SuperKernelRegion:
    """A SuperKernel: the kernels that name it. ``options`` as torchair takes them, ``name=value:name=value``."""

    name: str
    options: str = ""

    @property
    def stream_fusion(self) -> bool:
        """Whether it may hold kernels of two streams and of two core limits."""
        return "stream-fusion=1" in self.options.split(":")


@dataclass(frozen=True)
class Decision:
    """What became of one feature at one place.

    ``where``: layers and branch. ``gain_us``: predicted microseconds saved per step at the nominal costs,
    ``worst_gain_us``: the least over the perturbed costs; None where nothing was to be measured.
    """

    feature: str
    where: str
    applied: bool
    reason: str
    gain_us: float | None = None
    worst_gain_us: float | None = None


@dataclass(frozen=True)
class Pin:
    """What a user fixes for kernel ``node``; None leaves it to the scheduler.

    ``cores`` ``whole``: no limit. ``super_kernel`` and ``prefetch`` (of its weights): False keeps it out, True puts it
    in wherever that is possible.
    """

    node: str
    stream: str | None = None
    cores: Cores | Literal["whole"] | None = None
    super_kernel: bool | None = None
    prefetch: bool | None = None


@dataclass(frozen=True)
class Pins:
    """What a user fixes: ``features`` {name of `FEATURES`: switch} and single kernels."""

    features: Mapping[str, Switch] = field(default_factory=lambda: MappingProxyType({}))
    nodes: tuple[Pin, ...] = ()

    def switch(self, feature: str) -> Switch:
        """The switch of ``feature``; ``auto`` where nothing is said."""
        return self.features.get(feature, "auto")


@dataclass(frozen=True)
class Plan:
    """``placements`` in the order in which the kernels are emitted, which is their order within each stream; it has
    every kernel of the graph once. Empty: the plan has pins only and the scheduler is to make the rest.

    Times in microseconds per call of the graph: ``predicted_us`` of this plan, ``serial_us`` of the same kernels on
    one stream, ``lower_bound_us`` what no plan beats; None where it was not simulated.
    """

    target: str
    placements: tuple[Placement, ...] = ()
    waits: tuple[Wait, ...] = ()
    prefetches: tuple[PlannedPrefetch, ...] = ()
    regions: tuple[SuperKernelRegion, ...] = ()
    predicted_us: float | None = None
    serial_us: float | None = None
    lower_bound_us: float | None = None
    decisions: tuple[Decision, ...] = ()
    pins: Pins = field(default_factory=Pins)

    @property
    def complete(self) -> bool:
        """Whether it says where every kernel runs."""
        return bool(self.placements)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams in order of first use."""
        return tuple(dict.fromkeys(p.stream for p in self.placements))

    @property
    def by_node(self) -> dict[str, Placement]:
        """Placements by the name of their kernel."""
        return {p.node: p for p in self.placements}

    @property
    def changes_nothing(self) -> bool:
        """Whether it is the serial plan: one stream, no limits, no waits, no prefetch, no region."""
        plain = all(p.stream == MAIN and p.cores is None and p.super_kernel is None for p in self.placements)
        return plain and not (self.waits or self.prefetches or self.regions)
