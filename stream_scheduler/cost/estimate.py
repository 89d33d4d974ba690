"""Time, bytes and bound of one kernel."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.hardware import Hardware

from .chip import Chip, Parts, Share
from .kernel import Kernel, Work
from .kernels import all_kernels
from .laws import LAWS

BOUNDS = ("launch", "cube", "vector", "hbm", "l2", "link")


class UnknownKernelError(ValueError):
    """No kernel has this name; the message has the nearest one."""


@dataclass(frozen=True)
class Estimate:
    """A kernel's predicted duration, without the gap to the next kernel.

    ``parts`` are microseconds per resource before overlap (``launch`` is the fixed term); ``bound`` is the largest
    of them; ``hbm_bytes`` go through HBM, weights in L2 left out; ``cube_cores`` and ``vector_cores`` are occupied.
    """

    us: float
    bound: str
    parts: Mapping[str, float]
    work: Work
    hbm_bytes: float
    cube_cores: int
    vector_cores: int

    @property
    def kernel(self) -> str:
        return self.work.kernel.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **self.work.to_dict(),
            "us": self.us,
            "bound": self.bound,
            "parts_us": dict(self.parts),
            "hbm_bytes": self.hbm_bytes,
            "cube_cores": self.cube_cores,
            "vector_cores": self.vector_cores,
        }


@lru_cache(maxsize=1)
def _kernels() -> Mapping[str, Kernel]:
    return all_kernels()


def kernel_names() -> tuple[str, ...]:
    """Names of all kernels, family by family."""
    return tuple(_kernels())


def kernel(name: str) -> Kernel:
    """The kernel called ``name``. `UnknownKernelError` with the nearest name."""
    found = _kernels().get(name)
    if found is None:
        close = difflib.get_close_matches(name, kernel_names(), n=1, cutoff=0.0)
        known = ", ".join(kernel_names())
        raise UnknownKernelError(f"unknown kernel {name!r}; did you mean {close[0]!r}? known: {known}")
    return found


def estimate(
    what: str | Kernel | Work,
    sizes: Mapping[str, float] | None = None,
    *,
    hardware: Hardware,
    constants: Constants | None = None,
    share: Share | None = None,
) -> Estimate:
    """Predict one kernel on ``share`` of a die of ``hardware`` (None: the whole die, nothing in L2).

    ``what`` is a kernel or its name with ``sizes``, or work that was counted before. Raises `UnknownKernelError`,
    `SizeError` for wrong sizes, ValueError for a dtype that the cube does not have.
    """
    chosen = kernel(what) if isinstance(what, str) else what
    work = chosen if isinstance(chosen, Work) else chosen.work(**(sizes or {}))
    chip = Chip(hardware, load_constants() if constants is None else constants, share or Share())
    parts = LAWS[work.kernel.law](work, chip)
    times = {name: getattr(parts, name) for name in BOUNDS}
    return Estimate(
        us=parts.us,
        bound=max(times, key=lambda name: times[name]),
        parts=times,
        work=work,
        hbm_bytes=chip.from_hbm(work),
        cube_cores=chip.cube_cores if work.kernel.cube else 0,
        vector_cores=chip.vector_cores if work.kernel.vector else 0,
    )


__all__ = ["BOUNDS", "Chip", "Estimate", "Parts", "UnknownKernelError", "estimate", "kernel", "kernel_names"]
