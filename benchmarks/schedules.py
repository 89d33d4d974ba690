"""Write docs/schedules.md: plans beside those that experts wrote, what each feature is worth, and exact optima.

    python benchmarks/schedules.py            write the page (a quarter of an hour, most of it the exact solver)
    python benchmarks/schedules.py --quick    print it without the exact solver
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.networks import LITE, LONGCAT, LONGCAT_4, V32, V32_2, Case
from cannopy.stream_scheduler.bounds import bounds
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.model import load_model, model_names
from cannopy.stream_scheduler.network.setting import Load
from cannopy.stream_scheduler.plan import Pins, Plan, SuperKernelRegion, from_schedule, to_schedule
from cannopy.stream_scheduler.plan.segments import segments
from cannopy.stream_scheduler.scheduler import ScheduleOptions, schedule, search
from cannopy.stream_scheduler.scheduler.collectives import groups_by_ranks
from cannopy.stream_scheduler.scheduler.problem import Problem
from cannopy.stream_scheduler.simulator import Machine, Schedule, simulate
from cannopy.superkernel import SuperKernels, why_not

PAGE = Path(__file__).resolve().parents[1] / "docs" / "schedules.md"
TARGET = "atlas-a3"
SECONDS = 12.0
"""Of the solver's own clock, for one layer."""
ZOO = ("deepseek-v3.2", "deepseek-r1", "kimi-k2", "longcat-flash", "qwen2.5", "qwen3-moe")
R1 = Case("deepseek-r1", Load("decode", 48, 4096, 1), "ep=128,dp=128", "w8a8c8", "streams")
K2 = Case("kimi-k2", Load("decode", 1, 4060, 0), "ep=128,dp=128", "w8a8", "streams")
EXPERTS: dict[str, Case] = {"DeepSeek-V3.2-Exp": V32_2, "DeepSeek-R1": R1, "Kimi-K2": K2, "LongCat-Flash": LONGCAT_4}
"""Published decode layouts, one die of 128, with the placement that the published model code has."""
FUSED_WHOLE = frozenset({"DeepSeek-R1"})
"""Models whose published configuration puts all decoder layers into one SuperKernel scope."""
LAYOUTS = {"deepseek-v3.2": V32, "longcat-flash": LONGCAT, "longcat-flash-lite": LITE, "qwen3-30b-a3b": "ep=8,dp=8",
           "qwen2.5-7b": ""}
LOADS = (("decode, batch 4, 4K", Load("decode", 4, 4096)), ("decode, batch 32, 16K", Load("decode", 32, 16384)),
         ("prefill, 4K", Load("prefill", 1, 4096)))


def machine() -> Machine:
    """The die that everything here is planned for."""
    return Machine.of(load_hardware(TARGET), load_constants())


def graph(case: Case) -> Schedule:
    """The kernels of ``case`` on one stream."""
    serial = dataclasses.replace(case, placement="serial")
    return serial.estimate(load_hardware(TARGET), load_constants()).schedule


def expert_plan(name: str) -> Plan:
    """The expert's placement of a model of `EXPERTS` as a plan."""
    case = EXPERTS[name]
    placed = case.estimate(load_hardware(TARGET), load_constants()).schedule
    plan = from_schedule(placed, graph(case), TARGET)
    if name not in FUSED_WHOLE:
        return plan
    kernels = {task.name: task.load.kernel for task in placed.tasks if task.layer is not None}
    fused = [dataclasses.replace(p, super_kernel="decode_layer")
             if p.node in kernels and why_not(kernels[p.node]) is None else p for p in plan.placements]
    region = SuperKernelRegion("decode_layer", "stream-fusion=1")
    return dataclasses.replace(plan, placements=tuple(fused), regions=(region,))


def automatic(tasks: Schedule, **more: Any) -> Plan:
    """The scheduler's plan."""
    options = ScheduleOptions(TARGET, groups=groups_by_ranks(tasks.tasks), **more)
    return schedule(tasks, machine(), options, SuperKernels(TARGET))


def comparison() -> Iterator[tuple[str, ...]]:
    """Serial, expert and automatic steps in milliseconds, and what the plan took to make."""
    for name, case in EXPERTS.items():
        tasks = graph(case)
        start = time.process_time()
        plan = automatic(tasks)
        seconds = time.process_time() - start
        expert = simulate(to_schedule(expert_plan(name), tasks), machine()).step_us
        bound = bounds(tasks, machine()).us
        serial, us = plan.serial_us or 0.0, plan.predicted_us or 0.0
        yield (name, f"{serial / 1e3:.2f}", f"{expert / 1e3:.2f}", f"{us / 1e3:.2f}", f"{us / serial - 1:+.1%}",
               f"{us / expert - 1:+.1%}", f"{bound / 1e3:.2f}", str(len(plan.streams)), f"{seconds:.1f}")


def without(*features: str) -> Pins:
    """Pins that forbid ``features``."""
    return Pins(dict.fromkeys(features, "forbid"))


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "streams 1": {"streams": 1},
    "streams 3": {"streams": 3},
    "streams 4": {"streams": 4},
    "graph order": {"order": "graph"},
    "no core limits": {"pins": without("core_limits")},
    "equal shares": {"split": "half"},
    "no prefetch": {"pins": without("prefetch")},
    "no SuperKernel": {"pins": without("super_kernel")},
    "streams and limits alone": {"pins": without("prefetch", "super_kernel")},
    "prefetch alone": {"streams": 1, "pins": without("super_kernel")},
    "SuperKernel alone": {"streams": 1, "pins": without("prefetch")},
}


def ablation() -> Iterator[tuple[str, ...]]:
    """Change of the step against one stream, for each variant and model."""
    graphs = [graph(case) for case in EXPERTS.values()]
    for name, more in VARIANTS.items():
        plans = [automatic(tasks, **more) for tasks in graphs]
        yield (name, *(f"{(p.predicted_us or 0) / (p.serial_us or 1) - 1:+.1%}" for p in plans))


@dataclass(frozen=True)
class Gap:
    """A distinct layer in the common model: one stream, this scheduler, the solver's best and its bound; microseconds.
    """

    model: str
    load: str
    layer: int
    kernels: int
    serial_us: float
    us: float
    best_us: float
    bound_us: float

    @property
    def gap(self) -> float:
        """This scheduler over the solver's best, less one; the solver starts from this scheduler's solution."""
        return self.us / min(self.best_us, self.us) - 1


def distinct_layers(names: Iterable[str] | None = None) -> Iterator[tuple[str, str, int, Schedule]]:
    """(model, load, layer, its tasks) of every distinct layer of the described models."""
    for name in names or model_names():
        model = load_model(name)
        layout = LAYOUTS.get(name, "ep=128,dp=128,lm_head_tp=16" if model.experts else "attn_tp=8")
        for title, load in LOADS:
            seen = set()
            for part in segments(graph(Case(name, load, layout, "w8a8")).tasks):
                if part.layer is not None and part.kind not in seen:
                    seen.add(part.kind)
                    yield name, title, part.layer, Schedule(part.tasks, graphs=0)


def zoo_layers(names: Iterable[str] = ZOO) -> Iterator[tuple[str, str, int, Schedule]]:
    """The same of the fused decode graphs of the zoo's stock models, tiny sizes."""
    from cannopy.environment import import_torch

    import_torch()
    import cannopy
    from cannopy import api
    from cannopy.frontend import sources, state
    from cannopy.stream_scheduler.graph_cost import schedule_of
    from cannopy.stream_scheduler.network.pricing import Pricing

    pricing = Pricing(load_hardware(TARGET), load_constants())
    for name in names:
        loaded = sources.load(name, size="tiny", weights=False)
        inputs, kwargs = loaded.make_inputs("decode")
        method = loaded.method_of("decode")
        state.prepare_state(loaded.model, inputs, kwargs, method=method)
        program, _ = api.lower(loaded.model, method, inputs, kwargs, cannopy.Options(phase="decode"), {})
        seen = set()
        for part in segments(schedule_of(program, pricing).schedule.tasks):
            if part.layer is not None and part.kind not in seen and len(part.tasks) > 1:
                seen.add(part.kind)
                yield f"{name} tiny", "decode, graph", part.layer, Schedule(part.tasks, graphs=0)


def gap(model: str, load: str, layer: int, tasks: Schedule, streams: int = 2, seconds: float = SECONDS) -> Gap:
    """Solve one layer both ways."""
    from benchmarks.optimum import common_machine, common_tasks, optimum

    die = machine()
    options = ScheduleOptions(TARGET, streams, threshold=0.0, groups=groups_by_ranks(tasks.tasks))
    problem = Problem(common_tasks(tasks.tasks, die), common_machine(die), options)
    found = search.with_limits(problem, streams, search.unlimited(problem, streams))
    best = optimum(problem, streams, seconds, found.solution) if problem.has_branches else None
    serial = problem.time(problem.serial())
    return Gap(model, load, layer, problem.size, serial, found.us, best.us if best else serial,
               best.bound_us if best else serial)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def gap_lines(found: Sequence[Gap]) -> list[str]:
    """The summary and a row for each layer that has branches."""
    gaps = [g.gap for g in found]
    branching = [g for g in found if g.us < g.serial_us or g.best_us < g.serial_us]
    rows = [(g.model, g.load, str(g.layer), str(g.kernels), f"{g.serial_us:.1f}", f"{g.us:.1f}", f"{g.best_us:.1f}",
             f"{g.bound_us:.1f}", f"{g.gap:.1%}") for g in branching]
    return [
        f"{len(found)} distinct layers; the median gap is {statistics.median(gaps):.1%}, the worst {max(gaps):.1%}. Of "
        f"the {len(branching)} in which anything can be gained on a second stream, the median is "
        f"{statistics.median([g.gap for g in branching]):.1%}:",
        "",
        *table(("model", "load", "layer", "kernels", "one stream", "scheduler", "solver", "bound", "gap"), rows),
    ]


HEAD = """# Plans, ablations and exact optima

Written by `python benchmarks/schedules.py`. All times are predictions of the cost model and the simulator for one die
of Atlas A3 ([accuracy.md](accuracy.md) has what they are worth); nothing was run on a device. How plans are made:
[scheduling.md](scheduling.md).
"""


def page(exact: bool) -> str:
    """The whole page."""
    lines = [
        HEAD,
        "## Beside the experts' plans", "",
        "One decode step of a die in its published layout of 128, in milliseconds. The expert's plan is what the",
        "published model code does by hand, in the same simulator. R1's scope over all layers with `stream-fusion` is",
        "part of its plan but not of its time: what it gains was never published.", "",
        *table(("model", "one stream", "expert", "automatic", "against one stream", "against expert", "lower bound",
                "streams", "seconds of planning"), comparison()),
        "", "## What each feature is worth", "", "Change of the step against one stream.", "",
        *table(("variant", *EXPERTS), ablation()), "",
    ]
    if exact:
        found = [gap(*layer) for layer in itertools.chain(zoo_layers(), distinct_layers())]
        lines += [
            "## Against an exact solver", "",
            "OR-Tools CP-SAT solves each distinct layer of the zoo's fused decode graphs and of all described models",
            "on two streams, with a core limit for every kernel by itself; `benchmarks/optimum.py` states the model,",
            f"and the scheduler is run in the same one. Microseconds. The solver has {SECONDS:.0f} seconds of its own",
            "clock for a layer and starts from the scheduler's solution; where it stops before it has proved its best,",
            "the bound is below it.", "",
            *gap_lines(found), "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    quick = "--quick" in sys.argv[1:]
    text = page(not quick)
    print(text)
    if not quick:
        PAGE.write_text(text, encoding="utf-8")
