"""Vector classes. Row-parallel kernels have a step: up to about eight rows they cost little more than one row, from
thirty on each row waits for a vector core of its own and pays its latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work


def _rows(op: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """factor (fixed + step x^2 / (1 + x^2)) + bytes, with x = rows / step_rows and a factor per kernel."""
        c = chip.constants
        x = work.counts["rows"] / c["rows.step_rows"]
        return Parts(
            launch=c[f"rows.factor_{op}"] * (c["rows.fixed"] + c["rows.step"] * x * x / (1 + x * x)),
            hbm=chip.hbm_us(chip.from_hbm(work), c["rows.hbm"], on_vector=True),
            l2=chip.l2_us(chip.from_l2(work), on_vector=True),
            vector=chip.vector_us(work.vector_ops),
            overlap=0.0,
        )

    return law


def row_copy(work: Work, chip: Chip) -> Parts:
    """Rows moved by index: fixed + bytes, or one row's latency per core and wave."""
    c = chip.constants
    waves = work.counts["rows"] / chip.vector_cores
    return Parts(
        launch=c["rows.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["rows.hbm"], on_vector=True),
        l2=chip.l2_us(chip.from_l2(work), on_vector=True),
        vector=chip.vector_us(work.vector_ops) + waves * c["rows.indexed_row"],
        overlap=0.0,
    )


def _elementwise(fixed: str, rate: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """fixed + max(bytes, lane operations)."""
        c = chip.constants
        return Parts(
            launch=c[fixed],
            hbm=chip.hbm_us(chip.from_hbm(work), c[rate], on_vector=True),
            vector=chip.vector_us(work.vector_ops),
            overlap=0.0,
        )

    return law


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {
    "rows_norm": _rows("norm"),
    "rows_quant": _rows("quant"),
    "rows_swiglu": _rows("swiglu"),
    "rows_rotary": _rows("rotary"),
    "rows_cache": _rows("cache"),
    "gating": _rows("gating"),
    "row_copy": row_copy,
    "elementwise": _elementwise("elementwise.fixed", "rows.hbm"),
    "transpose": _elementwise("transpose.fixed", "transpose.hbm"),
}
