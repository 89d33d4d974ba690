"""Made-up graphs with plans that are right by construction: forks and joins, limits that fit, waits that are needed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cannopy.stream_scheduler.hardware import Hardware, load_hardware
from cannopy.stream_scheduler.plan.model import (
    Placement,
    Plan,
    PlannedPrefetch,
    SuperKernelRegion,
    Wait,
)
from cannopy.stream_scheduler.simulator import Schedule, Task, Weight
from cannopy.stream_scheduler.verifier import GraphFacts, Violation, verify_plan
from cannopy.stream_scheduler.verifier.facts import Hazard
from tests.simulator.loads import Fixed

CHIP: Hardware = load_hardware("atlas-a3")
SPLITS = (((16, 32), (8, 16)), ((12, 24), (12, 24)), ((8, 16), (16, 32)), ((20, 40), (4, 8)))
MEGABYTE = 1 << 20


def eligible(kernel: str) -> str:
    """Everything but embeddings fuses."""
    return "a table look-up is no AscendC kernel" if kernel == "embedding" else ""


@dataclass
class Case:
    """A graph and a plan for it that is right."""

    schedule: Schedule
    facts: GraphFacts
    plan: Plan

    def wrong(self, plan: Plan | None = None, facts: GraphFacts | None = None) -> list[Violation]:
        return verify_plan(plan or self.plan, self.schedule, CHIP, facts or self.facts, eligible)


@dataclass
class _Builder:
    pick: random.Random
    tasks: list[Task] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    prefetches: list[PlannedPrefetch] = field(default_factory=list)
    regions: list[SuperKernelRegion] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)

    def add(self, kernel: str, deps: tuple[str, ...], stream: str = "main", cores: tuple[int, int] | None = None,
            region: str | None = None, weight: bool = False) -> str:
        name = f"{kernel}_{len(self.tasks)}"
        weights = (Weight(f"w_{name}", float(8 * MEGABYTE)),) if weight else ()
        self.tasks.append(Task(name, Fixed(10.0, kernel=kernel), deps=deps, weights=weights))
        self.placements.append(Placement(name, stream, cores, region))
        return name


def case(seed: int) -> Case:
    """The case of ``seed``: the same for the same seed."""
    b = _Builder(random.Random(seed))
    last = b.add("embedding", ())
    for layer in range(b.pick.randint(1, 3)):
        last = _layer(b, layer, last)
    last = b.add("rms_norm", (last,))
    head = b.add("bf16_matmul", (last,), weight=True)
    sizes = {w.name: int(w.bytes) for t in b.tasks for w in t.weights} | {"cache": MEGABYTE}
    results = frozenset({head} | {h.writer for h in b.hazards})
    facts = GraphFacts(results, tuple(b.hazards), b.groups, sizes, frozenset({"cache"}))
    plan = Plan("atlas-a3", tuple(b.placements), tuple(b.waits), tuple(b.prefetches), tuple(b.regions))
    return Case(Schedule(tuple(b.tasks)), facts, plan)


def _layer(b: _Builder, layer: int, last: str) -> str:
    """A norm; a main branch in a SuperKernel beside a side branch with the rest of the cores; their join; a cache that
    is read and then written; two collectives; two sorts of which the second waits for the first."""
    main, side = b.pick.choice(SPLITS)
    region, name = f"sk{layer}", f"side{b.pick.randint(1, 2)}"
    b.regions.append(SuperKernelRegion(region))
    norm = b.add("rms_norm", (last,))
    x = norm
    for _ in range(b.pick.randint(2, 4)):
        x = b.add(b.pick.choice(("swiglu", "quant")), (x,), cores=main, region=region)
    heavy = b.add("grouped_matmul_bf16", (x,), cores=main, region=region, weight=True)
    b.prefetches.append(PlannedPrefetch(f"w_{heavy}", b.pick.choice((1, 4, 8)) * MEGABYTE, norm, heavy))
    y = norm
    for _ in range(b.pick.randint(1, 3)):
        y = b.add("bf16_matmul", (y,), name, side, weight=True)
    dead = b.add("copy", (y,), name, side)
    join = b.add("elementwise", (heavy, y))
    b.waits.append(Wait(join, dead))
    reader = b.add("lightning_indexer", (join,), name)
    writer = b.add("cache_update", (join,))
    b.waits.append(Wait(writer, reader))
    b.hazards.append(Hazard(reader, writer, "cache"))
    back = b.add("elementwise", (join, reader))
    first = b.add("all_gather", (back,))
    second = b.add("reduce_scatter", (first,))
    b.groups |= {first: "tp", second: "tp"}
    sort = b.add("moe_init_routing", (second,))
    other = b.add("moe_init_routing", (second,), name)
    b.waits.append(Wait(other, sort))
    return b.add("elementwise", (sort, other, back))
