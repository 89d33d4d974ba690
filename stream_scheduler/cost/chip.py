"""Rates of the part of a die that a kernel gets, and the pieces that its time is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from cannopy.stream_scheduler.constants import Constants
from cannopy.stream_scheduler.hardware import Hardware

from .kernel import Role, Work

VECTORS_PER_CUBE = 2


@dataclass(frozen=True)
class Share:
    """What a kernel gets of the die.

    ``cube_cores`` and ``vector_cores`` None: all of them. ``hbm`` is its share of the memory bandwidth, above 0 up
    to 1; ``l2_weights`` the share of its weight bytes that sits in L2 when it starts, 0 to 1.
    """

    cube_cores: int | None = None
    vector_cores: int | None = None
    hbm: float = 1.0
    l2_weights: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.hbm <= 1:
            raise ValueError(f"hbm: expected a share above 0 up to 1, found {self.hbm!r}")
        if not 0 <= self.l2_weights <= 1:
            raise ValueError(f"l2_weights: expected a share from 0 to 1, found {self.l2_weights!r}")
        for name in ("cube_cores", "vector_cores"):
            cores = getattr(self, name)
            if cores is not None and cores < 1:
                raise ValueError(f"{name}: expected at least 1, found {cores!r}")


@dataclass(frozen=True)
class Parts:
    """Microseconds by what they are spent on, before overlap.

    ``launch`` is the fixed term of the kernel. Memory and compute run side by side; ``overlap`` is the share of the
    shorter of (HBM, compute) that is not hidden all the same: 1 adds them up, 0 takes the maximum. What comes from
    L2 hides in full, its latency is short. ``pipelined``: the vector cores work on one tile while the cube works on
    the next, so the longer of the two counts and not their sum.
    """

    launch: float = 0.0
    cube: float = 0.0
    vector: float = 0.0
    hbm: float = 0.0
    l2: float = 0.0
    link: float = 0.0
    overlap: float = 1.0
    pipelined: bool = False

    @property
    def us(self) -> float:
        """The kernel's duration."""
        memory = self.hbm + self.l2
        compute = max(self.cube, self.vector) if self.pipelined else self.cube + self.vector
        return self.launch + self.link + max(memory, compute) + self.overlap * min(self.hbm, compute)


@dataclass(frozen=True)
class Chip:
    """Times on a share of a die. Efficiencies are shares of the rates in the hardware description."""

    hardware: Hardware
    constants: Constants
    share: Share = field(default_factory=Share)

    @property
    def cube_cores(self) -> int:
        cores = self.share.cube_cores
        return self.hardware.cube_cores if cores is None else min(cores, self.hardware.cube_cores)

    @property
    def vector_cores(self) -> int:
        cores = self.share.vector_cores
        return self.hardware.vector_cores if cores is None else min(cores, self.hardware.vector_cores)

    def cube_us(self, macs: float, dtype: str, efficiency: float) -> float:
        return 1e6 * macs / (self.hardware.cube_rate(dtype, self.cube_cores) * efficiency)

    def vector_us(self, operations: float) -> float:
        return 1e6 * operations / self.hardware.vector_rate(self.vector_cores)

    def hbm_us(self, size: float, efficiency: float, *, on_vector: bool = False) -> float:
        """Time to move ``size`` bytes: the memory's rate times ``efficiency``, at most what the cores can pull."""
        cores = self.hardware.core_hbm_bandwidth(*self._pools(on_vector)) * self.constants["memory.core_factor"]
        return 1e6 * size / min(self.hardware.hbm_bandwidth * efficiency * self.share.hbm, cores)

    def l2_us(self, size: float, *, on_vector: bool = False) -> float:
        rate = self.hardware.l2_read_bandwidth(*self._pools(on_vector)) * self.constants["memory.l2"]
        return 1e6 * size / rate

    def from_hbm(self, work: Work) -> float:
        """Bytes that go through HBM: everything but the weights that sit in L2."""
        return work.bytes - self.from_l2(work)

    def from_l2(self, work: Work) -> float:
        return work.read.get(Role.WEIGHTS, 0.0) * self.share.l2_weights

    def stays_in_l2(self, work: Work) -> bool:
        """Whether the kernel's activations are few enough to be found in L2 where the kernel before left them."""
        return work.activation_bytes <= self.constants["memory.activations"] * self.hardware.l2_bytes

    def _pools(self, on_vector: bool) -> tuple[int, int]:
        return (0, self.vector_cores) if on_vector else (self.cube_cores, 0)
