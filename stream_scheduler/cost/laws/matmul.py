"""Matmul classes: a fixed term, loading, multiplying; loading and multiplying hide each other only in part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work

CUBE_ROWS = 16
"""Rows that one cube instruction multiplies; fewer take as long."""


def _padded(work: Work) -> float:
    """MACs with M rounded up to what the cube multiplies at least."""
    return work.macs * max(1.0, CUBE_ROWS / work.counts["m"])


def _dense(section: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """fixed + depth K + (load, cube) partly overlapped. The depth term is the latency of K steps in one core."""
        c = chip.constants
        return Parts(
            launch=c[f"{section}.fixed"] + c["matmul.depth"] * work.counts["depth"],
            hbm=chip.hbm_us(chip.from_hbm(work), c[f"{section}.hbm"]),
            l2=chip.l2_us(chip.from_l2(work)),
            cube=chip.cube_us(_padded(work), work.kernel.mac_dtype, c[f"{section}.cube"]),
            overlap=c["matmul.overlap"],
        )

    return law


def batch_matmul(work: Work, chip: Chip) -> Parts:
    """fixed + load + max(waves of products over the cores, cube), partly overlapped."""
    c = chip.constants
    waves = math.ceil(work.counts["tasks"] / chip.cube_cores) * c["batch_matmul.wave"]
    cube = chip.cube_us(_padded(work), work.kernel.mac_dtype, c["matmul_bf16.cube"])
    return Parts(
        launch=c["batch_matmul.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["matmul_bf16.hbm"]),
        l2=chip.l2_us(chip.from_l2(work)),
        cube=max(waves, cube),
        overlap=c["matmul.overlap"],
    )


def grouped_matmul(work: Work, chip: Chip) -> Parts:
    """fixed + (load, cube) partly overlapped; the memory rate falls when few experts are active.

    ``factor`` is what the memory rate in whole networks is over the published one.
    """
    c = chip.constants
    active = work.counts["active"]
    efficiency = c["grouped_matmul.hbm"] * active / (active + c["grouped_matmul.few_experts"])
    efficiency = min(1.0, efficiency * c["grouped_matmul.factor"])
    return Parts(
        launch=c["grouped_matmul.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), efficiency),
        l2=chip.l2_us(chip.from_l2(work)),
        cube=chip.cube_us(_padded(work), work.kernel.mac_dtype, c["matmul_int8.cube"]),
        overlap=c["matmul.overlap"],
    )


def mla_prolog(work: Work, chip: Chip) -> Parts:
    """fixed (four products in a row with synchronisation) + load + cube."""
    c = chip.constants
    return Parts(
        launch=c["mla_prolog.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["mla_prolog.hbm"]),
        l2=chip.l2_us(chip.from_l2(work)),
        cube=chip.cube_us(_padded(work), work.kernel.mac_dtype, c["matmul_bf16.cube"]),
        vector=chip.vector_us(work.vector_ops),
        overlap=c["matmul.overlap"],
    )


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {
    "matmul_bf16": _dense("matmul_bf16"),
    "matmul_int8": _dense("matmul_int8"),
    "batch_matmul": batch_matmul,
    "grouped_matmul": grouped_matmul,
    "mla_prolog": mla_prolog,
}
