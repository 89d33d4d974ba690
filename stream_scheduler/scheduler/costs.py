"""Costs that are off by 30 %: what a choice has to win under as well.

The set is fixed: all kernels of a core pool, all memory times, all launch and synchronisation times lower or higher,
and each kernel on its own by a factor that is drawn from its place in the layer.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cannopy.stream_scheduler.simulator import Load, Machine, Profile

CHANGE = 0.3
LOW, HIGH = 1 - CHANGE, 1 + CHANGE


@dataclass(frozen=True)
class Scaled:
    """A load that takes ``factor`` as long, its memory time ``memory`` times that on top."""

    load: Load
    factor: float
    memory: float = 1.0
    _found: dict[tuple[int, int, float], Profile] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def kernel(self) -> str:
        return self.load.kernel

    @property
    def cores(self) -> tuple[int, int]:
        return self.load.cores

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        """See `simulator.Load`."""
        key = (cube, vector, resident)
        if key not in self._found:
            p = self.load.profile(cube, vector, resident)
            us = self.factor * (p.us + (self.memory - 1) * p.load_us)
            parts = tuple((name, self.factor * part * (self.memory if name == "hbm" else 1)) for name, part in p.parts)
            self._found[key] = Profile(us, p.hbm_bytes, parts, self.factor * self.memory * p.load_us)
        return self._found[key]


@dataclass(frozen=True)
class Resident:
    """A load of whose weights ``bytes`` are in L2 already."""

    load: Load
    bytes: float

    @property
    def kernel(self) -> str:
        return self.load.kernel

    @property
    def cores(self) -> tuple[int, int]:
        return self.load.cores

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        """See `simulator.Load`."""
        return self.load.profile(cube, vector, max(resident, self.bytes))


@dataclass(frozen=True)
class Perturbation:
    """One set of wrong costs. Factors of the times of cube kernels, of other kernels, of memory, of gaps, events and
    barriers; ``seed``: also one factor of its own for each kernel."""

    name: str
    cube: float = 1.0
    vector: float = 1.0
    memory: float = 1.0
    overhead: float = 1.0
    seed: int | None = None

    def loads(self, loads: Sequence[Load]) -> list[Load]:
        """``loads`` with these costs."""
        return [self._load(i, load) for i, load in enumerate(loads)]

    def machine(self, machine: Machine) -> Machine:
        """``machine`` with these costs; what a SuperKernel saves falls where its barriers rise."""
        rate = 1 / self.memory
        return dataclasses.replace(
            machine, hbm_rate=machine.hbm_rate * rate, core_hbm_rate=machine.core_hbm_rate * rate,
            prefetch_rate=machine.prefetch_rate * rate, gap_us=machine.gap_us * self.overhead,
            event_us=machine.event_us * self.overhead, sync_us=machine.sync_us * self.overhead,
            saved_us=machine.saved_us * (2 - self.overhead),
        )

    def _load(self, i: int, load: Load) -> Load:
        factor = self.cube if load.cores[0] else self.vector
        if self.seed is not None:
            draw = zlib.crc32(f"{self.seed} {i} {load.kernel}".encode()) / 0xFFFFFFFF
            factor *= LOW + (HIGH - LOW) * draw
        return load if factor == 1 and self.memory == 1 else Scaled(load, factor, self.memory)


PERTURBATIONS = (
    Perturbation("cube kernels faster", cube=LOW),
    Perturbation("cube kernels slower", cube=HIGH),
    Perturbation("other kernels faster", vector=LOW),
    Perturbation("other kernels slower", vector=HIGH),
    Perturbation("memory faster", memory=LOW),
    Perturbation("memory slower", memory=HIGH),
    Perturbation("launches and events cheaper", overhead=LOW),
    Perturbation("launches and events dearer", overhead=HIGH),
    Perturbation("each kernel by itself, 1", seed=1),
    Perturbation("each kernel by itself, 2", seed=2),
)
