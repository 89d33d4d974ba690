"""The few constants that only whole networks decide, fitted on the steps of network.csv.

A step is simulated for every residual, so this takes half a minute; it runs last and moves nothing that kernels decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from scipy.optimize import least_squares

from benchmarks.fit import SOFT, Group
from benchmarks.networks import Row, rows
from cannopy.stream_scheduler.constants import Constants

STEP = 0.1
EVALUATIONS = 6


def model_of(row: Row) -> str:
    """The network of a row: its name up to the quantisation."""
    return row.name.split(" W8A8")[0]


def fit_networks(group: Group, constants: Constants, without: str = "") -> Constants:
    """``constants`` with those of ``group`` fitted on all steps but those of the network ``without``."""

    def replaced(moves: Sequence[float]) -> Constants:
        """The constants for moves in logarithms, with 1 for the start, so that a step relative to them is not none."""
        pairs = zip(group.constants, moves, strict=True)
        return constants.replaced({c.name: c.start * math.exp(m - 1) for c, m in pairs})

    def residuals(moves: Sequence[float]) -> list[float]:
        errors = [math.log(1 + row.error) for row in rows(replaced(moves)) if model_of(row) != without]
        pulls = [SOFT * (m - 1) / c.prior for c, m in zip(group.constants, moves, strict=True) if c.prior]
        return [*errors, *pulls]

    found = least_squares(
        residuals,
        [1.0] * len(group.constants),
        loss="soft_l1",
        f_scale=SOFT,
        diff_step=STEP,
        max_nfev=EVALUATIONS,
        xtol=1e-3,
        ftol=1e-3,
    )
    return replaced(found.x)


def leave_network_out(group: Group, constants: Constants) -> Iterator[Row]:
    """Each step as constants predict it that were fitted on the other networks."""
    for model in dict.fromkeys(model_of(row) for row in rows(constants)):
        refitted = fit_networks(group, constants, without=model)
        yield from (row for row in rows(refitted) if model_of(row) == model)
