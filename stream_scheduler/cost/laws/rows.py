"""Vector classes. Row-parallel kernels have a step: up to about eight rows they cost little more than one row, from
thirty on each row waits for a vector core of its own and pays its latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work


def _memory(work: Work, chip: Chip, rate: str = "rows.hbm") -> tuple[float, float]:
    """Time in HBM and in L2: few activations are still in L2, many go through HBM."""
    in_l2 = work.bytes if chip.stays_in_l2(work) else chip.from_l2(work)
    hbm = chip.hbm_us(work.bytes - in_l2, chip.constants[rate], on_vector=True)
    return hbm, chip.l2_us(in_l2, on_vector=True)


def _rows(op: str, *, reduces: bool = True) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """fixed + factor step x^2 / (1 + x^2) + bytes + rows / cores, with x = rows / step_rows, a factor per kernel.

        SwiGLU reduces nothing and lacks the term of rows over cores.
        """
        c = chip.constants
        rows = work.counts["rows"]
        x = rows / c["rows.step_rows"]
        hbm, l2 = _memory(work, chip)
        return Parts(
            launch=c["rows.fixed"] + c[f"rows.factor_{op}"] * c["rows.step"] * x * x / (1 + x * x),
            hbm=hbm,
            l2=l2,
            vector=rows / chip.vector_cores * c["rows.row"] if reduces else 0.0,
        )

    return law


def _indexed(fixed: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """Rows moved by index: fixed + bytes, or one row's latency per core and wave."""
        c = chip.constants
        waves = work.counts["rows"] / chip.vector_cores
        hbm, l2 = _memory(work, chip)
        return Parts(
            launch=c[fixed],
            hbm=hbm,
            l2=l2,
            vector=chip.vector_us(work.vector_ops) + waves * c["rows.indexed_row"],
            overlap=0.0,
        )

    return law


def _elementwise(fixed: str, rate: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """fixed + max(bytes, lane operations)."""
        hbm, l2 = _memory(work, chip, rate)
        return Parts(
            launch=chip.constants[fixed],
            hbm=hbm,
            l2=l2,
            vector=chip.vector_us(work.vector_ops),
            overlap=0.0,
        )

    return law


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {
    "rows_norm": _rows("norm"),
    "rows_quant": _rows("quant"),
    "rows_swiglu": _rows("swiglu", reduces=False),
    "rows_rotary": _rows("rotary"),
    "rows_cache": _rows("cache"),
    "gating": _rows("gating"),
    "row_copy": _indexed("rows.fixed"),
    "cache_update": _indexed("elementwise.fixed"),
    "elementwise": _elementwise("elementwise.fixed", "rows.hbm"),
    "transpose": _elementwise("transpose.fixed", "transpose.hbm"),
}
