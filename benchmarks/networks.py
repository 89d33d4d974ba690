"""Published decode steps beside what the simulator predicts for them.

    python benchmarks/networks.py            table of all points

Every row uses the same constants; two of them were fitted on the points of network.csv together (fit_networks.py).
Layouts are the published ones; where a publication leaves a size open, the value that the same code base ships for that
model is used and the note says so.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.hardware import Hardware, load_hardware
from cannopy.stream_scheduler.network.model import load_model
from cannopy.stream_scheduler.network.report import StepEstimate, estimate_step, placement_of
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation

ACCEPTED_MTP2 = 1.15
"""Drafts accepted per step with two drafts. Not published; 0.7 for one draft and 1.44 for three make a geometric
series of ratio 0.643, whose first two terms are 1.15."""
V32 = "ep=128,dp=128,o_proj_tp=4,dense_tp=4,embed_tp=16,lm_head_tp=16"
LONGCAT = "ep=128,dp=128,o_proj_tp=8,dense_tp=8,lm_head_tp=16"
LITE = "ep=8,dp=8,lm_head_tp=8"
LITE_NOTE = "lm_head shared by all dies, as the code base does for LongCat-Flash"


@dataclass(frozen=True)
class Row:
    """One published figure and its prediction. ``fitted``: constants of the cost model were chosen with it in view."""

    file: str
    name: str
    measured: float
    predicted: float
    unit: str
    fitted: bool
    note: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Case:
    """One step: model, load, layout, quantisation and placement (``serial``, ``streams``,
    ``prefetch``: streams and prefetch, ``super_kernel``: streams and SuperKernel, ``expert``: all)."""

    model: str
    load: Load
    parallel: str
    quant: str
    placement: str = "serial"

    def estimate(self, hardware: Hardware, constants: Constants) -> StepEstimate:
        """Predict it."""
        model = load_model(self.model)
        return estimate_step(model, self.load, Parallel.parse(self.parallel), Quantisation.parse(self.quant), hardware,
                             self._placement(hardware), constants)

    def _placement(self, hardware: Hardware) -> Placement:
        if self.placement == "serial":
            return Placement()
        expert = placement_of(load_model(self.model), hardware, "expert")
        if self.placement == "expert":
            return expert
        return dataclasses.replace(expert, prefetch=self.placement == "prefetch",
                                   super_kernel=self.placement == "super_kernel")


V32_2 = Case("deepseek-v3.2", Load("decode", 2, 65536, 3), V32, "w8a8c8", "streams")
V32_4 = dataclasses.replace(V32_2, load=Load("decode", 4, 65536, 3))
LONGCAT_4 = Case("longcat-flash", Load("decode", 4, 4608, 2), LONGCAT, "w8a8", "expert")
LONGCAT_2 = dataclasses.replace(LONGCAT_4, load=Load("decode", 2, 4608, 2))
LITE_SERIAL = Case("longcat-flash-lite", Load("decode", 1, 4096), LITE, "w8a8")
LITE_STREAMS = dataclasses.replace(LITE_SERIAL, placement="streams")
LITE_BF16_8 = Case("longcat-flash-lite", Load("decode", 1, 1024), LITE, "bf16")
LITE_BF16_2 = Case("longcat-flash-lite", Load("decode", 0.25, 1024), LITE, "bf16")
LITE_BF16_4K = Case("longcat-flash-lite", Load("decode", 1, 4096), LITE, "bf16")
LITE_TP = Case("longcat-flash-lite", Load("decode", 1, 1024), "attn_tp=8,moe_tp=8", "bf16")


def rows(constants: Constants | None = None, hardware: Hardware | None = None) -> list[Row]:
    """The points of network.csv."""
    a3, c = hardware or load_hardware("atlas-a3"), constants or load_constants()
    file = "network.csv"
    found = []
    for case, batch, tpot in ((V32_2, 256, 19.84), (V32_4, 512, 22.78)):
        found.append(Row(file, f"DeepSeek-V3.2-Exp W8A8C8, batch {batch}, 64K, 3 drafts: step", tpot * 2.44,
                         case.estimate(a3, c).us / 1e3, "ms", True))
    found.append(Row(file, "LongCat-Flash W8A8, batch 512, 4608, 2 drafts: step", 10.37 * (1 + ACCEPTED_MTP2),
                     LONGCAT_4.estimate(a3, c).us / 1e3, "ms", True,
                     f"accepted drafts are not published, {ACCEPTED_MTP2} assumed"))
    for case, name, tpot, device in ((LITE_SERIAL, "serial", 8.21, 7.67), (LITE_STREAMS, "MoE on 8C16V", 7.12, 6.62)):
        step = case.estimate(a3, c)
        title = f"LongCat-Flash-Lite W8A8, batch 8, 4K, {name}"
        found.append(Row(file, f"{title}: step", tpot, step.us / 1e3, "ms", True, LITE_NOTE))
        found.append(Row(file, f"{title}: device", device, step.trace.us / 1e3, "ms", True, LITE_NOTE))
    return found


def wide(constants: Constants | None = None, hardware: Hardware | None = None) -> list[Row]:
    """Published steps that no constant was chosen with."""
    a3, c = hardware or load_hardware("atlas-a3"), constants or load_constants()
    file = "published"
    lite = "LongCat-Flash-Lite BF16"
    found = [
        Row(file, "LongCat-Flash W8A8, batch 256, 4608, 2 drafts: step", 9.95 * (1 + ACCEPTED_MTP2),
            LONGCAT_2.estimate(a3, c).us / 1e3, "ms", False, f"{ACCEPTED_MTP2} accepted drafts assumed"),
    ]
    for case, name, ms in ((LITE_BF16_2, "2 sequences on 8 dies, 1K", 8.10), (LITE_BF16_8, "8 sequences, 1K", 9.54),
                           (LITE_BF16_4K, "8 sequences, 4K", 9.80), (LITE_TP, "1 sequence, TP8, 1K", 5.76)):
        found.append(Row(file, f"{lite}, {name}: step", ms, case.estimate(a3, c).us / 1e3, "ms", False, LITE_NOTE))
    return found


def with_figure(hardware: Hardware, name: str, factor: float) -> Hardware:
    """``hardware`` with one of its figures multiplied."""
    figures = dict(hardware.figures)
    figures[name] = dataclasses.replace(figures[name], value=figures[name].value * factor)
    return dataclasses.replace(hardware, figures=MappingProxyType(figures))


def table(found: Iterable[Row]) -> str:
    """Rows as text."""
    return "\n".join(f"{r.name:75} {r.measured:8.2f} {r.predicted:8.2f} {r.unit:5} {r.error:+6.1%}" for r in found)


def main() -> int:
    """Print every point."""
    print(table([*rows(), *wide()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
