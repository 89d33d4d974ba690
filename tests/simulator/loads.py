"""Kernels of known length for tests of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.stream_scheduler.simulator import Machine, Profile


@dataclass(frozen=True)
class Fixed:
    """Takes ``us`` on ``cores``, moves ``bytes`` over HBM (less what is in L2, with the time that saves)."""

    us: float
    cores: tuple[int, int] = (24, 48)
    bytes: float = 0.0
    start_us: float = 0.0
    kernel: str = "fixed"

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        left = self.bytes - resident
        us = self.us * (left / self.bytes) if self.bytes else self.us
        load = us - self.start_us
        return Profile(us, left, (("launch", self.start_us), ("hbm" if self.bytes else "cube", load)),
                       load if self.bytes else 0.0)


def machine(**more: float) -> Machine:
    """24 cube and 48 vector cores, 1000 bytes per microsecond, no overheads."""
    values = {"cube_cores": 24, "vector_cores": 48, "hbm_rate": 1000.0, "core_hbm_rate": 1000 / 24, "l2_bytes": 1e6}
    return Machine(**{**values, **more})  # type: ignore[arg-type]
