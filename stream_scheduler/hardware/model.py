"""A chip as the cost model sees it. On Atlas A3 this is one die: what the software calls a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

VECTORS_PER_CUBE = 2


@dataclass(frozen=True)
class Figure:
    """One number with where it comes from.

    ``trust``: A primary source or raw profile; B vendor document or paper; C third-party measurement;
    D inferred from several sources, the inference is in ``source``; E recalled, nothing is fitted on it.
    """

    value: float
    unit: str
    source: str
    trust: str


@dataclass(frozen=True)
class Link:
    """A connection of one die: ``bandwidth`` one way in B/s, ``latency_us`` of the first byte."""

    bandwidth: float
    latency_us: float


@dataclass(frozen=True)
class Hardware:
    """One die.

    ``soc`` is the name that ``aclrtGetSocName`` returns, ``family`` the product (a name of ``Options.target``).
    Rates and sizes are properties computed from ``figures``; bytes, B/s, MAC/s, microseconds.
    """

    soc: str
    family: str
    figures: Mapping[str, Figure]

    def value(self, name: str) -> float:
        """The figure called ``name``, in its own unit. KeyError when this chip has none."""
        return self.figures[name].value

    @cached_property
    def cube_cores(self) -> int:
        return int(self.value("cube_cores"))

    @cached_property
    def vector_cores(self) -> int:
        return int(self.value("vector_cores"))

    @cached_property
    def clock_hz(self) -> float:
        return self.value("clock") * 1e6

    @cached_property
    def hbm_bytes(self) -> float:
        return self.value("hbm") * 2**30

    @cached_property
    def hbm_bandwidth(self) -> float:
        """Nominal bandwidth of the die's memory, B/s."""
        return self.value("hbm_bandwidth") * 1e12

    @cached_property
    def l2_bytes(self) -> float:
        return self.value("l2") * 2**20

    @property
    def launch_gap_us(self) -> float:
        """Idle time between two kernels of a captured graph."""
        return self.value("launch_gap")

    @property
    def graph_launch_us(self) -> float:
        """Host time of one graph launch that is not hidden behind the previous one."""
        return self.value("graph_launch")

    @property
    def event_us(self) -> float:
        """Wait of one stream for another."""
        return self.value("event")

    @cached_property
    def links(self) -> Mapping[str, Link]:
        """Connections by name. ``fabric`` is what collectives inside a server or supernode use."""
        names = [n.partition(".")[2].removesuffix(".bandwidth") for n in self.figures if n.endswith(".bandwidth")]
        return {
            n: Link(self.value(f"link.{n}.bandwidth") * 1e9, self.value(f"link.{n}.latency"))
            for n in names
        }

    def cube_rate(self, dtype: str, cores: int | None = None) -> float:
        """Peak MAC/s of ``cores`` cube cores (None: all) for operands of ``dtype``.

        Raises ValueError when the cube of this chip has no such dtype.
        """
        figure = self.figures.get(f"macs.{dtype}")
        if figure is None:
            known = sorted(n.removeprefix("macs.") for n in self.figures if n.startswith("macs."))
            raise ValueError(f"the cube of {self.soc} does not multiply {dtype}; it has {', '.join(known)}")
        return figure.value * self.clock_hz * (self.cube_cores if cores is None else cores)

    def vector_rate(self, cores: int | None = None) -> float:
        """Peak FP32 lane operations per second of ``cores`` vector cores (None: all)."""
        return self.value("vector_lanes") * self.clock_hz * (self.vector_cores if cores is None else cores)

    def core_hbm_bandwidth(self, cube: int | None = None, vector: int | None = None) -> float:
        """B/s that the cores themselves can move from and to HBM. Two vector cores share one cube core's port."""
        return self.value("hbm_per_core") * self.clock_hz * self._ports(cube, vector)

    def hbm(self, cube: int | None = None, vector: int | None = None) -> float:
        """B/s from HBM for this many cores: what they can move, at most what the memory gives."""
        return min(self.hbm_bandwidth, self.core_hbm_bandwidth(cube, vector))

    def l2_read_bandwidth(self, cube: int | None = None, vector: int | None = None) -> float:
        """B/s that the cores can read from L2."""
        return self.value("l2_read") * self.clock_hz * self._ports(cube, vector)

    def _ports(self, cube: int | None, vector: int | None) -> float:
        """Ports to memory in units of cube cores: the larger of the two pools that are in use."""
        if cube is None and vector is None:
            return self.cube_cores
        return max(cube or 0, (vector or 0) / VECTORS_PER_CUBE)
