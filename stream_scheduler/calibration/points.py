"""The CSV files of this folder. Those of kernels have one form: name, kernel, sizes, share of the die, time, source."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from cannopy.stream_scheduler.constants import Constants
from cannopy.stream_scheduler.cost import Estimate, Share, Work, estimate, kernel
from cannopy.stream_scheduler.hardware import Hardware, load_hardware

FITTED = ("matmul", "core_split", "small_ops", "collectives", "published")
HELD_OUT = ("held_out", "other_chips")
CHIP = "atlas-a3"


@dataclass(frozen=True)
class Point:
    """One measured kernel: ``us`` at ``sizes`` on ``share`` of a die of ``chip``. ``source`` is a key of `sources`."""

    file: str
    name: str
    kernel: str
    sizes: Mapping[str, float]
    share: Share
    us: float
    source: str
    chip: str = CHIP

    @cached_property
    def hardware(self) -> Hardware:
        """The die that it was measured on."""
        return load_hardware(self.chip)

    @cached_property
    def work(self) -> Work:
        """What the kernel does at these sizes."""
        return kernel(self.kernel).work(**self.sizes)

    def cold(self) -> Point:
        """The same point with nothing in L2."""
        return replace(self, share=replace(self.share, l2_weights=0.0))

    def estimate(self, constants: Constants) -> Estimate:
        """The model's answer at this point."""
        return estimate(self.work, hardware=self.hardware, constants=constants, share=self.share)


@cache
def table(name: str) -> tuple[Mapping[str, str], ...]:
    """Rows of ``name``.csv as text by column."""
    text = (files(__package__) / f"{name}.csv").read_text(encoding="utf-8")
    return tuple(MappingProxyType(row) for row in csv.DictReader(text.splitlines()))


@cache
def load_points(name: str) -> tuple[Point, ...]:
    """The kernels of one file, in its order; ``name`` is in `FITTED` or `HELD_OUT`."""
    return tuple(_point(name, row) for row in table(name))


@lru_cache(maxsize=1)
def sources() -> Mapping[str, Mapping[str, Any]]:
    """Source key to ``trust`` and ``text``."""
    return MappingProxyType(yaml.safe_load((files(__package__) / "sources.yaml").read_text(encoding="utf-8")))


def _point(file: str, row: Mapping[str, str]) -> Point:
    pairs = (pair.split("=") for pair in row["sizes"].split())
    share = Share(int(row["cube"]), int(row["vector"]), l2_weights=float(row["l2_weights"]))
    if row["source"] not in sources():
        raise ValueError(f"{file}.csv: {row['name']}: source {row['source']!r} is not in sources.yaml")
    sizes = {name: float(value) for name, value in pairs}
    return Point(
        file, row["name"], row["kernel"], MappingProxyType(sizes), share, float(row["us"]), row["source"],
        row.get("chip", CHIP),
    )
