"""Least squares of the cost model's constants on the calibration points, group by group.

Residuals are logarithms of predicted over measured time, with a soft loss beyond 15 %. A pair of points that
differ only in their cores adds the logarithm of the ratio of the two. Constants are searched in logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from scipy.optimize import least_squares

from cannopy.stream_scheduler.calibration import FITTED, Point, load_points
from cannopy.stream_scheduler.constants import Constant, Constants
from cannopy.stream_scheduler.cost.chip import Chip
from cannopy.stream_scheduler.cost.laws import LAWS

GROUPS = Path(__file__).with_name("groups.yaml")
NETWORKS = "network"
SOFT = 0.15
WIDE = 100.0
PAIR_WEIGHT = 1.75
PAIRED_WEIGHT = 0.7
"""Shapes of the points in pairs are inferred: their times count less, their ratio, which needs no shape, more."""


@dataclass(frozen=True)
class Searched:
    """One constant of a group: where the search starts, its limits, and the width of a pull towards the start."""

    name: str
    start: float
    low: float
    high: float
    prior: float | None
    unit: str
    source: str


@dataclass(frozen=True)
class Group:
    """Constants that are fitted together, and the points they are fitted on."""

    name: str
    selection: tuple[str, ...]
    constants: tuple[Searched, ...]

    @property
    def on_networks(self) -> bool:
        """Whether its points are steps of networks, not kernels."""
        return self.selection == (NETWORKS,)

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(p for chosen in self.selection for p in _selected(chosen))


def load_groups() -> tuple[Group, ...]:
    """The groups of groups.yaml."""
    entries = yaml.safe_load(GROUPS.read_text(encoding="utf-8"))
    return tuple(
        Group(e["name"], tuple(e["points"]), tuple(_searched(name, c) for name, c in e["constants"].items()))
        for e in entries
    )


def _searched(name: str, entry: Mapping[str, Any]) -> Searched:
    start = entry["start"]
    low, high = entry.get("low", start / WIDE), entry.get("high", start * WIDE)
    return Searched(name, start, low, high, entry.get("prior"), entry["unit"], entry["source"])


def started(groups: Sequence[Group], published: Mapping[str, Constant]) -> Constants:
    """The published constants and the start values of the searched ones."""
    searched = {
        c.name: Constant(float(c.start), c.unit, ", ".join(g.selection), c.source) for g in groups for c in g.constants
    }
    return Constants(MappingProxyType({**published, **searched}))


def fit_group(group: Group, points: Sequence[Point], constants: Constants, start: Constants) -> Constants:
    """``constants`` with those of ``group`` fitted on ``points``; the search begins at ``start``."""
    names = [c.name for c in group.constants]
    lows = [math.log(c.low) for c in group.constants]
    highs = [math.log(c.high) for c in group.constants]
    first = [
        min(max(math.log(start[c.name]), low + 1e-6), high - 1e-6)
        for c, low, high in zip(group.constants, lows, highs, strict=True)
    ]

    paired = pairs(points)

    def residuals(logs: Sequence[float]) -> list[float]:
        tried = constants.replaced({n: math.exp(v) for n, v in zip(names, logs, strict=True)})
        pulls = [
            SOFT * (v - math.log(c.start)) / c.prior for c, v in zip(group.constants, logs, strict=True) if c.prior
        ]
        return [*_residuals(points, paired, tried), *pulls]

    found = least_squares(residuals, first, bounds=(lows, highs), loss="soft_l1", f_scale=SOFT, xtol=1e-6, ftol=1e-7)
    return constants.replaced({n: math.exp(v) for n, v in zip(names, found.x, strict=True)})


def fit_all(groups: Sequence[Group], published: Mapping[str, Constant]) -> Constants:
    """Every group of kernels in order; a later one uses the constants of the earlier ones."""
    start = started(groups, published)
    constants = start
    for group in groups:
        if group.on_networks:
            continue
        constants = fit_group(group, group.points, constants, start)
    return constants


def leave_one_out(
    group: Group, constants: Constants, files: Collection[str] = FITTED
) -> Iterator[tuple[Point, float]]:
    """Each point of the group that is in ``files`` with the time predicted by constants fitted on all others.

    The two points of a pair leave together: one would give the other away.
    """
    for point in (p for p in group.points if p.file in files):
        others = [p for p in group.points if (p.kernel, p.sizes) != (point.kernel, point.sizes)]
        refitted = fit_group(group, others, constants, constants) if others else constants
        yield point, point.estimate(refitted).us


def pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Points that differ only in their cores, the one with fewer first."""
    found = []
    for few in points:
        for all_ in points:
            same = few.kernel == all_.kernel and few.sizes == all_.sizes
            if same and (few.share.cube_cores or 0) < (all_.share.cube_cores or 0):
                found.append((few, all_))
    return found


def _residuals(
    points: Sequence[Point], paired: Sequence[tuple[Point, Point]], constants: Constants
) -> list[float]:
    logs = {id(p): math.log(_us(p, constants) / p.us) for p in points}
    in_pair = {id(p) for pair in paired for p in pair}
    single = [logs[id(p)] * (PAIRED_WEIGHT if id(p) in in_pair else 1.0) for p in points]
    return single + [PAIR_WEIGHT * (logs[id(few)] - logs[id(all_)]) for few, all_ in paired]


def _us(point: Point, constants: Constants) -> float:
    """The time law alone, which a fit asks for some ten thousand times."""
    return LAWS[point.work.kernel.law](point.work, Chip(point.hardware, constants, point.share)).us


def _selected(chosen: str) -> tuple[Point, ...]:
    file, _, kernel = chosen.partition(":")
    found = tuple(p for p in load_points(file) if not kernel or p.kernel == kernel)
    if not found:
        raise ValueError(f"{GROUPS.name}: {chosen} selects no point")
    return found
