"""Small graphs of kernels that scale with their cores, for tests of the scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Plan
from cannopy.stream_scheduler.scheduler.collectives import EXCHANGES, RINGS
from cannopy.stream_scheduler.simulator import Profile, Schedule, Task, Weight
from cannopy.stream_scheduler.verifier import GraphFacts, Violation, verify_plan
from cannopy.superkernel import why_not

CUBE, VECTOR, BOTH = (24, 0), (0, 48), (24, 48)
RATE = 1.4e6
"""Bytes per microsecond that a kernel reads on the whole chip."""


@dataclass(frozen=True)
class Kernel:
    """``fixed`` microseconds, and ``work`` microseconds on ``cores`` that grow as cores are taken away; reading
    ``bytes`` of weights takes its time beside that."""

    kernel: str
    cores: tuple[int, int]
    work: float
    fixed: float = 2.0
    bytes: float = 0.0

    def profile(self, cube: int, vector: int, resident: float) -> Profile:
        share = min(cube / self.cores[0] if self.cores[0] else 1.0, vector / self.cores[1] if self.cores[1] else 1.0)
        left = max(self.bytes - resident, 0.0)
        load = left / (RATE * share)
        us = self.fixed + max(self.work / share, load)
        pool = "cube" if self.cores[0] else "vector"
        parts = (("launch", self.fixed), (pool, self.work / share), ("hbm", load))
        return Profile(us, left, parts, max(0.0, load - self.work / share))


def task(name: str, kernel: str, cores: tuple[int, int], work: float, *deps: str, mib: float = 0.0,
         layer: int | None = 0) -> Task:
    """A task; ``mib`` of weights of its own."""
    size = mib * (1 << 20)
    weights = (Weight(f"w_{name}", size),) if mib else ()
    return Task(name, Kernel(kernel, cores, work, bytes=size), deps=deps, weights=weights, label=name.split(".")[-1],
                layer=layer)


def shared_expert(layers: int = 1) -> Schedule:
    """Layers of routing, dispatch, experts and combine, with a shared expert beside them."""
    tasks: list[Task] = []
    last: tuple[str, ...] = ()
    for n in range(layers):
        p = f"{n}."
        tasks += [
            task(f"{p}norm", "add_rms_norm", VECTOR, 4, *last, layer=n),
            task(f"{p}router", "bf16_matmul", CUBE, 6, f"{p}norm", mib=4, layer=n),
            task(f"{p}gating", "moe_gating_top_k", VECTOR, 4, f"{p}router", layer=n),
            task(f"{p}dispatch", "moe_dispatch", VECTOR, 38, f"{p}norm", f"{p}gating", layer=n),
            task(f"{p}shared_up", "bf16_matmul", CUBE, 4, f"{p}norm", mib=40, layer=n),
            task(f"{p}experts_up", "grouped_matmul_bf16", CUBE, 10, f"{p}dispatch", mib=80, layer=n),
            task(f"{p}shared_act", "swiglu", VECTOR, 3, f"{p}shared_up", layer=n),
            task(f"{p}experts_act", "swiglu", VECTOR, 12, f"{p}experts_up", layer=n),
            task(f"{p}experts_down", "grouped_matmul_bf16", CUBE, 5, f"{p}experts_act", mib=40, layer=n),
            task(f"{p}shared_down", "bf16_matmul", CUBE, 2, f"{p}shared_act", mib=20, layer=n),
            task(f"{p}combine", "moe_combine", VECTOR, 38, f"{p}experts_down", f"{p}gating", layer=n),
            task(f"{p}add", "elementwise", VECTOR, 1, f"{p}combine", f"{p}shared_down", layer=n),
        ]
        last = (f"{p}add",)
    return Schedule(tuple(tasks), graphs=0)


KINDS = (("add_rms_norm", VECTOR), ("bf16_matmul", CUBE), ("swiglu", VECTOR), ("mla_prolog", BOTH),
         ("grouped_matmul_bf16", CUBE), ("all_gather", VECTOR), ("moe_dispatch", VECTOR), ("cache_update", VECTOR),
         ("moe_init_routing", VECTOR), ("fused_infer_attention_gqa", BOTH))


def random_graph(seed: int) -> Schedule:
    """One to three layers of one or two kinds, of random kernels that read one or two earlier ones of the layer or what
    came before it; kernels that nothing reads occur."""
    pick = random.Random(seed)
    kinds = [_shape(pick) for _ in range(pick.randint(1, 2))]
    tasks = [task("embed", "embedding", VECTOR, 3, layer=None)]
    for layer in range(pick.randint(1, 3)):
        entry = tasks[-1].name
        for i, (kernel, cores, work, mib, deps) in enumerate(kinds[layer % len(kinds)]):
            before = tuple(dict.fromkeys(f"l{layer}.k{j}" if j >= 0 else entry for j in deps))
            tasks.append(task(f"l{layer}.k{i}", kernel, cores, work, *before, mib=mib, layer=layer))
    tasks.append(task("head", "bf16_matmul", CUBE, 10, tasks[-1].name, mib=60, layer=None))
    return Schedule(tuple(tasks), graphs=0)


def _shape(pick: random.Random) -> list[tuple[str, tuple[int, int], float, float, list[int]]]:
    found = []
    for i in range(pick.randint(2, 12)):
        kernel, cores = pick.choice(KINDS)
        mib = pick.choice((0, 8, 40)) if "matmul" in kernel or kernel == "mla_prolog" else 0
        deps = [pick.randint(max(-1, i - 4), i - 1) for _ in range(pick.randint(1, 2))]
        found.append((kernel, cores, round(pick.uniform(1, 60), 1), float(mib), deps))
    return found


def groups(schedule: Schedule) -> dict[str, str]:
    """One group of each kind of collective."""
    named = {"experts": EXCHANGES, "ring": RINGS}
    return {t.name: name for t in schedule.tasks for name, kernels in named.items() if t.load.kernel in kernels}


def violations(plan: Plan, schedule: Schedule) -> list[Violation]:
    """What the verifier has against ``plan``. Every kernel that nothing reads is a result."""
    read = {name for t in schedule.tasks for name in t.deps}
    results = frozenset(t.name for t in schedule.tasks if t.name not in read)
    sizes = {w.name: int(w.bytes) for t in schedule.tasks for w in t.weights}
    facts = GraphFacts(results, (), groups(schedule), sizes)
    return verify_plan(plan, schedule, load_hardware("atlas-a3"), facts, lambda kernel: why_not(kernel) or "")
