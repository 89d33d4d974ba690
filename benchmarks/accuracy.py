"""Write docs/accuracy.md: every calibration point beside its prediction, and how the constants were validated.

    python benchmarks/accuracy.py            write the page and its plots (a few minutes: every fit is repeated)
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.effects import effects
from benchmarks.exact import exact_lines
from benchmarks.fit import leave_one_out, load_groups, pairs
from benchmarks.fit_networks import leave_network_out
from benchmarks.networks import V32_4, Row, rows, wide
from benchmarks.plans import summary
from benchmarks.residuals import Residual, plot
from cannopy.stream_scheduler.calibration import FITTED, HELD_OUT, Point, load_points, sources
from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.cost import sensitivity
from cannopy.stream_scheduler.hardware import load_hardware

DOCS = Path(__file__).resolve().parents[1] / "docs"
GOALS = {"matmul": 0.12, "small_ops": 0.20, "collectives": 0.12}
RATIO_GOAL = 0.10
STEP_GOAL = 0.15
SENSITIVE = 20
HEAD = """# Accuracy of the cost model

Written by `python benchmarks/accuracy.py`. Measured times are published figures, for Atlas A3 dies but in
`other_chips.csv`; no kernel was run for this page. The points are in `stream_scheduler/calibration/`, the constants in
`stream_scheduler/constants/`, and `python benchmarks/calibrate.py` gives the constants again. One set of them makes
every prediction below.

*Left out* is the prediction of a point by constants that were fitted without it (of both points of a pair that differ
only in cores). Held-out points and other chips had no part in any fit.
"""


@dataclass(frozen=True)
class Judged:
    """A point, its prediction, and its prediction by a fit without it (None: it is in no fit)."""

    point: Point
    us: float
    bound: str
    left_out: float | None

    @property
    def error(self) -> float:
        return self.us / self.point.us - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out is None else self.left_out / self.point.us - 1


def judge(constants: Constants) -> list[Judged]:
    """Every point of every file."""
    without = {
        (p.file, p.name): us
        for group in load_groups()
        if not group.on_networks
        for p, us in leave_one_out(group, constants)
    }
    found = []
    for file in (*FITTED, *HELD_OUT):
        for p in load_points(file):
            e = p.estimate(constants)
            found.append(Judged(p, e.us, e.bound, without.get((p.file, p.name))))
    return found


def mean_left_out(judged: Iterable[Judged], file: str) -> float:
    """Mean absolute left-out error of one file."""
    errors = (j.left_out_error for j in judged if j.point.file == file)
    return statistics.mean(abs(e) for e in errors if e is not None)


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)] + [""]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def _summary(judged: list[Judged], steps: list[Row], left_out_steps: list[Row]) -> list[str]:
    body = []
    for file in (*FITTED, *HELD_OUT):
        of = [j for j in judged if j.point.file == file]
        errors = [abs(j.error) for j in of]
        left = f"{100 * mean_left_out(judged, file):.1f} %" if file in FITTED else "not fitted"
        goal = f"{100 * GOALS[file]:.0f} %" if file in GOALS else ""
        body.append([f"`{file}.csv`", str(len(of)), f"{100 * statistics.mean(errors):.1f} %",
                     f"{100 * statistics.median(errors):.1f} %", left, goal])
    errors, out = [abs(r.error) for r in steps], [abs(r.error) for r in left_out_steps]
    body.append(["decode steps, `network.csv`", str(len(steps)), f"{100 * statistics.mean(errors):.1f} %",
                 f"{100 * statistics.median(errors):.1f} %", f"{100 * statistics.mean(out):.1f} %",
                 f"each within {100 * STEP_GOAL:.0f} %"])
    others = [abs(r.error) for r in wide(load_constants())]
    body.append(["decode steps, other published", str(len(others)), f"{100 * statistics.mean(others):.1f} %",
                 f"{100 * statistics.median(others):.1f} %", "not fitted", "median 12 %"])
    return _table(("points", "number", "mean error", "median error", "mean error left out", "goal"), body)


def _ratios(constants: Constants) -> list[str]:
    body = []
    for few, all_ in pairs(load_points("core_split")):
        predicted = few.estimate(constants).us / all_.estimate(constants).us
        cold = few.cold().estimate(constants).us
        error = predicted / (few.us / all_.us) - 1
        body.append([few.name.removesuffix(" 12C24V"), f"{few.us / all_.us:.3f}", f"{predicted:.3f}", _percent(error),
                     f"{few.estimate(constants).us:.1f}", f"{cold:.1f}"])
    head = ("kernel", "measured ratio", "predicted ratio", "error", "us at 12C24V", "us at 12C24V, nothing in L2")
    return _table(head, body)


def _points(judged: list[Judged], file: str) -> list[str]:
    head = ("point", "kernel", "measured, us", "predicted, us", "error", "left out", "bound", "source")
    body = [
        [j.point.name, f"`{j.point.kernel}`", f"{j.point.us:g}", f"{j.us:.1f}", _percent(j.error),
         _percent(j.left_out_error), j.bound, f"{j.point.source} ({sources()[j.point.source]['trust']})"]
        for j in judged
        if j.point.file == file
    ]
    return _table(head, body)


def _steps(found: Sequence[Row], left_out: Sequence[Row] = ()) -> list[str]:
    without = {r.name: r for r in left_out}
    body = [
        [r.name, f"{r.measured:.2f} {r.unit}", f"{r.predicted:.2f} {r.unit}",
         _percent(r.error) if r.unit != "%" else f"{r.predicted - r.measured:+.1f} points",
         _percent(without[r.name].error) if r.name in without else "", r.note]
        for r in found
    ]
    return _table(("figure", "measured", "predicted", "error", "left out", "note"), body)


def _sensitivity(constants: Constants) -> list[str]:
    hardware = load_hardware("atlas-a3")
    kernels = [p for file in FITTED for p in load_points(file)]
    base = {id(p): p.estimate(constants).us for p in kernels}

    def moved(changed: Constants) -> float:
        return 1 + statistics.mean(abs(p.estimate(changed).us / base[id(p)] - 1) for p in kernels)

    def step(changed: Constants) -> float:
        return V32_4.estimate(hardware, changed).us

    over_kernels = {s.name: s.spread for s in sensitivity(moved, constants)}
    body = [
        [f"`{s.name}`", f"{constants[s.name]:.4g} {constants.entry(s.name).unit}", _percent(s.low / s.base - 1),
         _percent(s.high / s.base - 1), f"{100 * over_kernels[s.name]:.1f} %"]
        for s in sensitivity(step, constants)[:SENSITIVE]
    ]
    return _table(("constant", "value", "step at -30 %", "step at +30 %", "mean move of the kernels above"), body)


def page(judged: list[Judged], constants: Constants) -> str:
    """The whole page as Markdown."""
    steps = rows(constants)
    network_group = next(g for g in load_groups() if g.on_networks)
    left_out = list(leave_network_out(network_group, constants))
    fitted = ", ".join(f"`{c.name}`" for c in network_group.constants)
    lines = [HEAD, *_summary(judged, steps, left_out)]
    lines += ["![Errors of the fit](accuracy-fit.svg)", "", "![Errors of points left out](accuracy-left-out.svg)", ""]
    lines += ["## Exact counts", "", *exact_lines()]
    lines += [
        "## Half the cores", "",
        f"The same kernels of one network on 12C24V and 24C48V; each ratio is to be within {100 * RATIO_GOAL:.0f} %.",
        "", *_ratios(constants),
    ]
    lines += [
        "## Networks", "",
        f"Decode steps through the simulator. {fitted} are fitted on `network.csv`; *left out* is the step by "
        "constants fitted on the other networks.", "", *_steps(steps, left_out),
        "Published steps that no constant was fitted on:", "", *_steps(wide(constants)),
        "Effects of plans (`plan_effects.csv`):", "", *_steps(effects(constants)),
    ]
    lines += [
        "## What if a constant is wrong", "",
        "DeepSeek-V3.2 W8A8C8, batch 512, 64K, with each constant 30 % lower and higher, one at a time. The "
        f"{SENSITIVE} that move the step most.", "", *_sensitivity(constants),
        "The choice between one stream, two streams, and two streams with prefetch and SuperKernel (`expert`), with "
        "the same changes and those of the chip's figures:", "", *summary(), "",
    ]
    for file in (*FITTED, *HELD_OUT):
        lines += [f"## {file}.csv", "", *_points(judged, file)]
    lines += ["## Sources", ""]
    lines += [f"- **{key}** ({s['trust']}): {' '.join(s['text'].split())}" for key, s in sources().items()]
    return "\n".join([*lines, ""])


def plots(judged: list[Judged]) -> dict[str, str]:
    """File name to SVG: errors of the fit (with held-out points), and of points left out."""
    fit: dict[str, list[Residual]] = {}
    left: dict[str, list[Residual]] = {}
    for j in judged:
        fit.setdefault(j.point.file, []).append(Residual(j.point.us, j.error, f"{j.point.name}: {_percent(j.error)}"))
        if j.left_out_error is not None:
            note = f"{j.point.name}: {_percent(j.left_out_error)}"
            left.setdefault(j.point.file, []).append(Residual(j.point.us, j.left_out_error, note))
    return {
        "accuracy-fit.svg": plot("Error of each kernel (held_out and other_chips: in no fit)", fit, 0.12),
        "accuracy-left-out.svg": plot("Error of each kernel when it is left out of the fit", left, 0.12),
    }


def main() -> int:
    constants = load_constants()
    judged = judge(constants)
    for name, svg in plots(judged).items():
        (DOCS / name).write_text(svg, encoding="utf-8")
    (DOCS / "accuracy.md").write_text(page(judged, constants), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
