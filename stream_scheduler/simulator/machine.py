"""The part of a chip that kernels share: core pools, HBM, L2, launch and synchronisation times."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.stream_scheduler.constants import Constants
from cannopy.stream_scheduler.hardware import Hardware


@dataclass(frozen=True)
class Machine:
    """One die as the simulator sees it. Times in microseconds, bandwidths in bytes per microsecond.

    ``hbm_rate`` is what concurrent readers reach together, ``hbm_peak`` the nominal rate, ``core_hbm_rate`` that of one
    core.
    ``gap_us``: from the end of a kernel to the start of the next one in its stream. ``event_us``: additional delay of
    a dependency between streams. ``graph_us``: host time of one graph launch that nothing hides. ``saved_us``: what a
    kernel inside a SuperKernel does not spend (its own start), ``sync_us``: the barrier in front of it, on top of
    the gap. ``prefetch_rate``: of the engine behind `npu_prefetch`. ``l2_bytes``: how many bytes may stream through L2
    before a prefetched line has gone.
    """

    cube_cores: int
    vector_cores: int
    hbm_rate: float
    core_hbm_rate: float
    l2_bytes: float
    hbm_peak: float = 0.0
    gap_us: float = 0.0
    event_us: float = 0.0
    graph_us: float = 0.0
    saved_us: float = 0.0
    sync_us: float = 0.0
    prefetch_rate: float = 1.0

    @classmethod
    def of(cls, hardware: Hardware, constants: Constants) -> Machine:
        """The die ``hardware`` with the simulator's constants (``simulator.*``)."""
        cube, vector = hardware.cube_cores, hardware.vector_cores
        return cls(
            cube_cores=cube,
            vector_cores=vector,
            hbm_rate=hardware.hbm_bandwidth * constants["simulator.hbm_share"] * 1e-6,
            core_hbm_rate=hardware.core_hbm_bandwidth(cube, vector) / cube * 1e-6,
            hbm_peak=hardware.hbm_bandwidth * 1e-6,
            l2_bytes=hardware.l2_bytes * constants["simulator.l2_share"],
            gap_us=hardware.launch_gap_us,
            event_us=hardware.event_us,
            graph_us=hardware.graph_launch_us,
            saved_us=constants["simulator.super_kernel_saved_us"],
            sync_us=constants["simulator.super_kernel_sync_us"],
            prefetch_rate=hardware.hbm_bandwidth * constants["simulator.prefetch_share"] * 1e-6,
        )
