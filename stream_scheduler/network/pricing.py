"""Kernels with sizes as the simulator's `Load`: times from the cost model, computed once per distinct kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cannopy.stream_scheduler.constants import Constants
from cannopy.stream_scheduler.cost import Share, estimate, kernel
from cannopy.stream_scheduler.cost.kernel import Work
from cannopy.stream_scheduler.hardware import Hardware
from cannopy.stream_scheduler.simulator import Profile

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})


@dataclass(frozen=True, eq=False)
class PricedKernel:
    """A kernel at given sizes on given hardware (a `Load`)."""

    work: Work
    hardware: Hardware
    constants: Constants
    fixed_pools: tuple[bool, bool] = (True, True)
    _profiles: dict[tuple[int, int, float], Profile] = field(default_factory=dict, repr=False)
    _cores: list[tuple[int, int]] = field(default_factory=list, repr=False)
    """The cores it takes when it may have all: one entry once they are known."""

    @property
    def kernel(self) -> str:
        return self.work.kernel.name

    @property
    def cores(self) -> tuple[int, int]:
        if not self._cores:
            self.profile(self.hardware.cube_cores, self.hardware.vector_cores, 0.0)
        return self._cores[0]

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        """Duration on so many cores with ``resident`` bytes of the weights in L2; includes the skew of ranks."""
        weights = self.work.weight_bytes
        share = min(resident / weights, 1.0) if weights else 0.0
        key = (cube, vector, round(share, 4))
        if key not in self._profiles:
            found = estimate(self.work, hardware=self.hardware, constants=self.constants,
                             share=Share(cube_cores=cube or None, vector_cores=vector or None, l2_weights=share))
            skew = self.constants["simulator.rank_skew_us"] if self.kernel in COLLECTIVES else 0.0
            parts = {**found.parts, "launch": found.parts.get("launch", 0.0) + skew}
            self._profiles[key] = Profile(found.us + skew, found.hbm_bytes, tuple(parts.items()),
                                          load_time(found.us, found.parts))
            if not self._cores:
                self._cores.append((found.cube_cores * self.fixed_pools[0], found.vector_cores * self.fixed_pools[1]))
        return self._profiles[key]


def load_time(us: float, parts: Mapping[str, float]) -> float:
    """How much shorter a kernel would be if HBM took no time: its law is fixed and link terms, the longer of memory
    and compute, and a share of the shorter of HBM and compute. Where cube and vector cores work at the same time, which
    shows in a duration below their sum, compute is the longer of the two."""
    rest, compute = us - parts["launch"] - parts["link"], parts["cube"] + parts["vector"]
    if rest < compute:
        compute = max(parts["cube"], parts["vector"])
    return max(0.0, rest - max(parts["l2"], compute))


@dataclass
class Pricing:
    """Prices kernels for one chip; equal calls share one `PricedKernel`."""

    hardware: Hardware
    constants: Constants
    _found: dict[Any, PricedKernel] = field(default_factory=dict, repr=False)

    def price(self, name: str, cube_only: bool = False, **sizes: float) -> PricedKernel:
        """The kernel ``name`` at these sizes. ``cube_only``: an int8 matmul that leaves its result in int32, which
        takes no vector cores."""
        key = (name, cube_only, tuple(sorted(sizes.items())))
        if key not in self._found:
            work = kernel(name).work(**sizes)
            self._found[key] = PricedKernel(work, self.hardware, self.constants, (True, not cube_only))
        return self._found[key]
