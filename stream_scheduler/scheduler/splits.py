"""Core limits that may be given to kernels which run side by side."""

from __future__ import annotations

from cannopy.stream_scheduler.plan import Cores
from cannopy.stream_scheduler.simulator import Machine

PARTS = 6
"""A chip is cut into at least so many parts; published splits of 24 cube cores are 8 + 16 and 12 + 12."""


def step(machine: Machine) -> int:
    """Cube cores of one part: the largest number that cuts the chip into an even number of parts, `PARTS` or more; one
    core on a chip with fewer."""
    sizes = [d for d in range(1, machine.cube_cores + 1) if machine.cube_cores % d == 0]
    fine = [d for d in sizes if machine.cube_cores // d >= PARTS and machine.cube_cores // d % 2 == 0]
    return max(fine, default=1)


def limits(machine: Machine) -> list[Cores]:
    """Limits below the whole chip, rising; vector cores in the chip's proportion to cube cores."""
    ratio = machine.vector_cores // machine.cube_cores
    size = step(machine)
    return [(c, ratio * c) for c in range(size, machine.cube_cores, size)]


def splits(machine: Machine, streams: int) -> list[tuple[Cores, ...]]:
    """Every way to share the whole chip among ``streams`` streams."""
    ratio, size, cube = machine.vector_cores // machine.cube_cores, step(machine), machine.cube_cores

    def parts(left: int, count: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(left,)]
        return [(c, *rest) for c in range(size, left - size * (count - 1) + 1, size)
                for rest in parts(left - c, count - 1)]

    return [tuple((c, ratio * c) for c in one) for one in parts(cube, streams)] if cube >= size * streams else []


def half(machine: Machine, streams: int) -> list[tuple[Cores, ...]]:
    """Equal shares, rounded down."""
    ratio, cube = machine.vector_cores // machine.cube_cores, machine.cube_cores // streams
    return [((cube, ratio * cube),) * streams] if cube else []
