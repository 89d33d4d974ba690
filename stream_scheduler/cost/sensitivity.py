"""How far a prediction moves when a constant is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cannopy.stream_scheduler.constants import Constants


@dataclass(frozen=True)
class Sensitivity:
    """A prediction with one constant lower, as it is, and higher."""

    name: str
    low: float
    base: float
    high: float

    @property
    def spread(self) -> float:
        """The larger of the two moves as a share of the prediction."""
        return max(abs(self.low - self.base), abs(self.high - self.base)) / self.base


def sensitivity(
    predict: Callable[[Constants], float],
    constants: Constants,
    names: Iterable[str] | None = None,
    change: float = 0.3,
) -> tuple[Sensitivity, ...]:
    """``predict`` with each constant lowered and raised by the share ``change``, one at a time.

    ``names`` None: all constants. The result is sorted by spread, largest first.
    """
    base = predict(constants)
    moved = [
        Sensitivity(
            name, predict(constants.scaled(name, 1 - change)), base, predict(constants.scaled(name, 1 + change))
        )
        for name in (constants.names() if names is None else names)
    ]
    return tuple(sorted(moved, key=lambda s: -s.spread))
