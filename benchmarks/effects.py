"""Published effects of streams, prefetch and SuperKernel beside what the simulator predicts for them.

    python benchmarks/effects.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.networks import LITE_SERIAL, LITE_STREAMS, Row
from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.hardware import Hardware, load_hardware
from cannopy.stream_scheduler.network.model import load_model
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation
from cannopy.stream_scheduler.network.step import build
from cannopy.stream_scheduler.simulator import Machine, Prefetch, Profile, Schedule, Task, simulate

MEGABYTES = (10, 20, 40, 60, 80, 100, 110, 120)


@dataclass(frozen=True)
class Measured:
    """A kernel of known duration."""

    kernel: str
    us: float
    cores: tuple[int, int]

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        return Profile(self.us, 0.0, (("launch", self.us),))


# Device time by kernel and number of calls in the profile that the sample's README prints; six scopes, of which five
# fuse [GroupedMatmul, MoeGatingTopK, GroupedMatmul, GroupedMatmul] and one the last two DequantSwigluQuant.
SAMPLE_US: Mapping[str, tuple[float, int]] = {
    "GroupedMatmul": (126.26, 15), "MoeGatingTopK": (68.32, 5), "DequantSwigluQuant": (24.18, 5),
}
SAMPLE_OTHERS_US = 407.54 - sum(us for us, _ in SAMPLE_US.values())
_SCOPE = ("GroupedMatmul", "MoeGatingTopK", "GroupedMatmul", "GroupedMatmul")
SAMPLE: Sequence[tuple[str, Sequence[str]]] = (
    ("sk1", _SCOPE), ("", ("DequantSwigluQuant",)), ("sk2", _SCOPE), ("", ("DequantSwigluQuant",)),
    ("", ("DequantSwigluQuant",)), ("sk3", ("DequantSwigluQuant", "DequantSwigluQuant")), ("sk4", _SCOPE),
    ("sk5", _SCOPE), ("sk6", _SCOPE),
)


def super_kernel_sample(machine: Machine, fused: bool) -> float:
    """Microseconds of the sample's kernels; gaps between kernels are not part of a profile's total."""
    cores = {"GroupedMatmul": (machine.cube_cores, machine.vector_cores)}
    tasks = [Task("others", Measured("others", SAMPLE_OTHERS_US, (0, machine.vector_cores)))]
    for scope, names in SAMPLE:
        for name in names:
            total, calls = SAMPLE_US[name]
            load = Measured(name, total / calls, cores.get(name, (0, machine.vector_cores)))
            tasks.append(Task(f"{name}.{len(tasks)}", load, super_kernel=scope if scope and fused else None))
    return simulate(Schedule(tuple(tasks), graphs=0), replace(machine, gap_us=0.0)).us


def prefetch_sweep(constants: Constants, hardware: Hardware) -> dict[int, float]:
    """{MB of each o_proj that is prefetched while attention runs: throughput over that without prefetch}.

    DeepSeek-R1 W8A8 on two nodes, 16 dies, experts spread, attention data-parallel. The publication leaves batch and
    context open: 4 sequences of 3.5K per die here.
    """
    model = load_model("deepseek-r1")
    schedule = build(model, Load("decode", 4, 3584), Parallel.parse("ep=16,dp=16"), Quantisation.parse("w8a8"),
                     Placement(), Pricing(hardware, constants))
    machine = Machine.of(hardware, constants)
    plain = simulate(schedule, machine).step_us
    whole = {w.name: w.bytes for task in schedule.tasks for w in task.weights}
    found = {}
    for megabytes in MEGABYTES:
        prefetches = [
            Prefetch(f"{i}.o_proj", min(megabytes * 1e6, whole[f"{i}.o_proj"]), f"{i}.mla_prolog")
            for i in range(model.layers)
        ]
        found[megabytes] = plain / simulate(schedule.replace(schedule.tasks, prefetches), machine).step_us
    return found


def two_streams(first: str) -> float:
    """S0 = V20 C40 V20 and S1 = V30 C20 V20 on exclusive pools, ``first`` issued first."""
    work = {"S0": ((0, 48, 20), (24, 0, 40), (0, 48, 20)), "S1": ((0, 48, 30), (24, 0, 20), (0, 48, 20))}
    tasks = [
        Task(f"{stream}.{i}", Measured("unit", us, (cube, vector)), stream)
        for stream in sorted(work, key=lambda name: name != first) for i, (cube, vector, us) in enumerate(work[stream])
    ]
    return simulate(Schedule(tuple(tasks), graphs=0), Machine(24, 48, 1.0, 1.0, 1.0)).us


def effects(constants: Constants | None = None) -> list[Row]:
    """The points of plan_effects.csv: each after/before ratio, as a percentage of change."""
    c = constants or load_constants()
    a3, a2 = load_hardware("atlas-a3"), load_hardware("atlas-a2")
    machine = Machine.of(a3, c)
    file = "plan_effects.csv"
    sample = super_kernel_sample(machine, True) / super_kernel_sample(machine, False)
    streams = LITE_STREAMS.estimate(a3, c).trace.us / LITE_SERIAL.estimate(a3, c).trace.us
    sweep = prefetch_sweep(c, a2)
    found = [
        Row(file, "SuperKernel: graph-autofusion sample", 100 * (384.66 / 407.54 - 1), 100 * (sample - 1), "%", True),
        Row(file, "streams: LongCat-Flash-Lite, MoE on 8C16V", 100 * (6.62 / 7.67 - 1), 100 * (streams - 1), "%",
            False),
        Row(file, "two streams, S1 first", 110, two_streams("S1"), "us", False),
        Row(file, "two streams, S0 first", 100, two_streams("S0"), "us", False),
    ]
    alone = LITE_STREAMS.estimate(a3, c).trace.us
    for placement in ("prefetch", "super_kernel"):
        more = replace(LITE_STREAMS, placement=placement).estimate(a3, c).trace.us / alone
        title = f"LongCat-Flash-Lite, {placement} added to streams"
        found.append(Row("published", title, 0.0, 100 * (more - 1), "%", False,
                         "no gain was measured: the model is too hopeful for kernels this short"))
    for megabytes, tokens in ((10, 90.74), (80, 92.57), (100, 92.65), (120, 92.07)):
        found.append(Row(file, f"prefetch: R1 W8A8 on Atlas A2, {megabytes} MB", 100 * (tokens / 90.71 - 1),
                         100 * (sweep[megabytes] - 1), "%", megabytes == 100, "batch and context not published"))
    return found


def main() -> int:
    """Print every effect and the prefetch sweep."""
    for row in effects():
        print(f"{row.name:55} {row.measured:8.2f} {row.predicted:8.2f} {row.unit}")
    sweep = prefetch_sweep(load_constants(), load_hardware("atlas-a2"))
    print("prefetch sweep: " + ", ".join(f"{mb} MB {100 * (gain - 1):+.2f} %" for mb, gain in sweep.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
