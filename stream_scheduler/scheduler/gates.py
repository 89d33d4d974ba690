"""Whether a feature is worth it: by how much it wins at the costs as they are and at costs that are 30 % off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cannopy.stream_scheduler.plan import Switch
from cannopy.stream_scheduler.scheduler.costs import PERTURBATIONS, Perturbation

Timer = Callable[[Perturbation | None], float]
"""Microseconds of one choice under perturbed costs; None: the costs as they are."""


@dataclass(frozen=True)
class Verdict:
    """What a gate found; microseconds per layer."""

    applied: bool
    gain_us: float
    worst_gain_us: float
    reason: str


def judge(before: Timer, after: Timer, least_us: float, switch: Switch) -> Verdict:
    """Compare two choices. ``after`` passes when it wins more than ``least_us`` under every set of costs; ``force``
    passes it wherever it can run."""
    base, time = before(None), after(None)
    if math.isinf(time):
        return Verdict(False, 0.0, 0.0, "it cannot run: kernels would wait for each other's cores")
    gain = worst = base - time
    where = "the costs as they are"
    for one in PERTURBATIONS:
        won = before(one) - after(one)
        if won < worst:
            worst, where = won, one.name
    if switch == "force":
        return Verdict(True, gain, worst, "forced")
    if worst > least_us:
        return Verdict(True, gain, worst, f"wins {gain:.1f} us, at least {worst:.1f} us when costs are 30 % off")
    reason = f"no gain: wins {gain:.1f} us of {base:.1f} us"
    reason += f", {worst:.1f} us with {where}" if worst < gain else ""
    return Verdict(False, gain, worst, f"{reason}; {least_us:.1f} us are asked for")
