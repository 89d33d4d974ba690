"""How far a wrong constant moves the choice between placements.

    python benchmarks/plans.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.networks import LITE_SERIAL, with_figure
from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.hardware import Hardware, load_hardware

PLACEMENTS = ("serial", "streams", "expert")
FIGURES = ("launch_gap", "event", "hbm_bandwidth", "link.fabric.bandwidth")
CHANGE = 0.3


@dataclass(frozen=True)
class Choice:
    """The fastest placement with constant ``name`` multiplied by ``factor``, and what it and the base choice gain over
    one stream."""

    name: str
    factor: float
    best: str
    best_gain: float
    base_gain: float


def device_times(constants: Constants, hardware: Hardware) -> dict[str, float]:
    """{placement: device time of LongCat-Flash-Lite W8A8, batch 8, 4K, in microseconds}."""
    return {
        name: replace(LITE_SERIAL, placement=name).estimate(hardware, constants).trace.us for name in PLACEMENTS
    }


def choices(constants: Constants | None = None, hardware: Hardware | None = None) -> tuple[Choice, list[Choice]]:
    """The choice with the constants as they are, and with each constant, and some figures of the chip, 30 % lower and
    higher, one at a time."""
    c, a3 = constants or load_constants(), hardware or load_hardware("atlas-a3")
    times = device_times(c, a3)
    base = min(times, key=lambda name: times[name])
    found = []
    for factor in (1 - CHANGE, 1 + CHANGE):
        found += [_choice(name, factor, base, device_times(c.scaled(name, factor), a3)) for name in c.names()]
        found += [_choice(name, factor, base, device_times(c, with_figure(a3, name, factor))) for name in FIGURES]
    return _choice("", 1.0, base, times), found


def _choice(name: str, factor: float, base: str, times: Mapping[str, float]) -> Choice:
    best = min(times, key=lambda placement: times[placement])
    serial = times["serial"]
    return Choice(name, factor, best, times[best] / serial - 1, times[base] / serial - 1)


def summary() -> list[str]:
    """Sentences for the accuracy page."""
    base, found = choices()
    moved = [c for c in found if c.best != base.best]
    gains = [c.base_gain for c in found]
    lines = [
        f"LongCat-Flash-Lite W8A8 is fastest as `{base.best}` ({100 * base.base_gain:+.1f} % device time against one "
        f"stream). Over {len(found)} changes the gain of that placement runs from {100 * min(gains):+.1f} to "
        f"{100 * max(gains):+.1f} %; another placement is faster in {len(moved)} of them.",
    ]
    lines += [f"- `{c.name}` × {c.factor:g}: `{c.best}` {100 * c.best_gain:+.1f} %, `{base.best}` "
              f"{100 * c.base_gain:+.1f} %" for c in moved]
    return lines


if __name__ == "__main__":
    print("\n".join(summary()))
