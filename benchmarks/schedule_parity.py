"""Every schedule of every tiny model on the host engine: bit-identical to the graph without one?

    python -m benchmarks.schedule_parity [--model NAME …] [--form stock serving] [--phase decode prefill] [--random N]

Schedules: the automatic one, one to four streams by force, core limits, prefetches and SuperKernel regions by force,
random ones that the schedule verifier accepts. Each is written into the graph, lowered by torchair, checked, and run on
the host engine: once in the order of the graph, and then in random orders that keep data, control edges and the order
within each stream alone, as streams on a device might run. All results and all tensors that the call may write are
compared bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

import cannopy
from cannopy import api, pipeline, planning
from cannopy.backend import build as backend
from cannopy.backend.ge_graph import proto
from cannopy.backend.ge_graph.op_types import NOT_KERNELS
from cannopy.backend.host.activate import activate
from cannopy.backend.torchair import PlanLostError
from cannopy.frontend import outputs, state
from cannopy.fx_passes.program import Program
from cannopy.pipeline_text import DEFAULT, parse
from cannopy.planning import Planned
from cannopy.stream_scheduler import emission, verifier
from cannopy.stream_scheduler.emission import marks
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.plan import Placement, Plan, PlannedPrefetch, Wait
from cannopy.superkernel import why_not

TARGET = "atlas-a3"
PLAIN = DEFAULT.removesuffix(",schedule")
FORCED = {
    "automatic": "schedule",
    **{f"{n} streams": f"schedule{{streams={n}}}" for n in (1, 2, 3, 4)},
    "streams by force": "schedule{streams=force,core_limits=forbid,prefetch=forbid,super_kernel=forbid}",
    "core limits by force": "schedule{streams=force,core_limits=force,prefetch=forbid,super_kernel=forbid}",
    "prefetch by force": "schedule{streams=forbid,prefetch=force,super_kernel=forbid}",
    "SuperKernel by force": "schedule{streams=forbid,prefetch=forbid,super_kernel=force}",
}
SPLITS = (((16, 32), (8, 16)), ((12, 24), (12, 24)), ((4, 8), (20, 40)))


@dataclass
class Case:
    """One call of a model, lowered without a schedule. ``call()`` gives new arguments with the same values."""

    model: torch.nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: str
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        activate()
        self.options = cannopy.Options(phase=self.phase, use_cache=False, pipeline=PLAIN)  # type: ignore[arg-type]
        state.prepare_state(self.model, self.args, self.kwargs, method=self.method)
        self.program, _ = api.lower(self.model, self.method, self.args, self.kwargs, self.options, {})

    def copied(self) -> Program:
        """The program, to be changed."""
        p = self.program
        return dataclasses.replace(p, gm=copy.deepcopy(p.gm), inputs=list(p.inputs), weights=list(p.weights),
                                   facts=dict(p.facts))

    def planned(self, text: str) -> Planned:
        """What stage ``text`` of a pipeline plans."""
        (stage,) = parse(f"{PLAIN},{text}").stages[-1:]
        return planning.make(self.program, stage, TARGET)

    def build(self, plan: Plan | None, engine: str) -> Any:
        """The compiled call with ``plan`` written into its graph; the lowered graph is checked for the plan."""
        program = self.copied()
        with api.target_of(self.options):
            if plan is not None:
                emission.write(program, plan)
            made = dataclasses.replace(api.build_options(pipeline.plan(self.options)), engine=engine)
            found = backend.lookup(self.model, self.method, self.args, self.kwargs, made, outputs.builder)
            with found:
                return backend.build(program, self.model, self.method, self.args, self.kwargs, made, found, {},
                                     outputs.builder)

    def results(self, compiled: Any) -> list[torch.Tensor]:
        """Everything that a call gives and everything that it may have written."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        found = compiled(*args, **kwargs)
        after = [value.clone() for value in tensors((found, args, kwargs))]
        after += [value.clone() for _, value in self.model.named_buffers()]
        with torch.no_grad():
            for name, value in self.model.named_buffers():
                value.copy_(buffers[name])
        return after


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, those of objects such as caches among them, in a fixed order."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            for part in one:
                walk(part)
        elif isinstance(one, dict):
            for part in one.values():
                walk(part)
        elif hasattr(one, "__dict__") and id(one) not in seen and not isinstance(one, type):
            seen.add(id(one))
            walk(vars(one))

    walk(_pytree.tree_flatten(value)[0])
    return found


def fill(value: Any, seed: int = 0) -> None:
    """Random numbers into the floating tensors of ``value``: a cache of zeros would hide what is read from it."""
    generator = torch.Generator().manual_seed(seed)
    for one in tensors(value):
        if one.is_floating_point():
            one.copy_(torch.randn(one.shape, generator=generator).to(one.dtype))


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit by bit, NaN included."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8) if a.numel() and a.dim() else a,
                        b.contiguous().view(torch.uint8) if b.numel() and b.dim() else b)
        for a, b in zip(one, other, strict=True))


def random_plans(case: Case, count: int, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Plans that the verifier accepts: a random order, kernels on random streams, limits of a random split, random
    waits and prefetches; what is rejected goes back to main or gets a wait."""
    facts, hardware = verifier.facts_of(case.program), load_hardware(TARGET)
    graph = case.planned("schedule{streams=1,prefetch=forbid,super_kernel=forbid}").schedule
    stuck = emission.cannot_wait(case.program)
    for number in range(count):
        pick = random.Random(seed + number)
        order = _random_order({t.name: t.deps for t in graph.tasks}, pick)
        names = ["main", *(f"side{n}" for n in range(1, pick.randint(2, 4)))]
        stream = {name: pick.choice(names) if pick.random() < 0.5 else "main" for name in order}
        split = dict(zip(names, pick.choice(SPLITS), strict=False)) if len(names) == 2 and pick.random() < 0.5 else {}
        waits: list[Wait] = []
        for i in range(1, len(order)):
            if pick.random() < 0.1 and order[i] not in stuck:
                waits.append(Wait(order[i], order[pick.randrange(i)]))
        readers = {t.name: t.weights for t in graph.tasks if t.weights}
        fetches = []
        for i, name in enumerate(order):
            if i and name in readers and pick.random() < 0.3:
                weight = pick.choice(readers[name]).name
                if weight in facts.sizes and weight not in facts.written:
                    fetches.append(PlannedPrefetch(weight, pick.randint(1, facts.sizes[weight]),
                                                   order[pick.randrange(i)], name))
        for _ in range(4 * len(order)):
            fetches = [dataclasses.replace(f, stream=stream[f.after]) for f in fetches]
            plan = Plan(TARGET, tuple(Placement(n, stream[n], split.get(stream[n])) for n in order), tuple(waits),
                        tuple(fetches))
            wrong = verifier.verify_plan(plan, graph, hardware, facts, lambda kernel: why_not(kernel) or "")
            if not wrong:
                yield f"random {seed + number}", plan
                break
            first = wrong[0]
            if first.check == "memory" and first.nodes[1] not in stuck and \
                    order.index(first.nodes[0]) < order.index(first.nodes[1]):
                waits.append(Wait(first.nodes[1], first.nodes[0]))
            elif first.check == "prefetch":
                fetches = [f for f in fetches if (f.after, f.before) != first.nodes]
            elif first.check in ("order", "kernels"):
                raise AssertionError(first)
            else:
                for name in first.nodes:
                    stream[name] = "main"
                split = {} if "core" in first.check or first.check == "hang" else split


def _random_order(deps: dict[str, tuple[str, ...]], pick: random.Random) -> list[str]:
    """The kernels in a random order in which each comes behind what it reads."""
    left = {name: {d for d in before if d in deps} for name, before in deps.items()}
    order: list[str] = []
    while left:
        name = pick.choice([n for n, before in left.items() if not before])
        order.append(name)
        del left[name]
        for before in left.values():
            before.discard(name)
    return order


def shuffled(graph: Any, pick: random.Random) -> Any:
    """``graph`` with its ops in a random order that keeps data and control edges and the order of the kernels of each
    stream."""
    last: dict[str, str] = {}
    deps: dict[str, tuple[str, ...]] = {}
    ops = {op.name: op for op in graph.op}
    for op in graph.op:
        data, control = proto.edges(op)
        before = [edge.source for edge in (*data, *control) if edge is not None]
        if op.type not in NOT_KERNELS:
            stream = bytes(op.attr[marks.STREAM].s).decode() if marks.STREAM in op.attr else "main"
            before += [last[stream]] if stream in last else []
            last[stream] = op.name
        deps[op.name] = tuple(before)
    other = type(graph)()
    other.CopyFrom(graph)
    del other.op[:]
    for name in _random_order(deps, pick):
        other.op.add().CopyFrom(ops[name])
    return other


def in_other_orders(case: Case, compiled: Any, expected: Sequence[torch.Tensor], count: int) -> list[int]:
    """Seeds of the orders of the lowered graph in which something else came out."""
    from cannopy.backend.host import engine
    from cannopy.backend.host.engine import plan as engine_plan

    graph = engine.recorded()[-1]
    own, wrong = graph._plan, []
    for seed in range(count):
        graph._plan = engine_plan.build(shuffled(graph.ge_graph, random.Random(seed)))
        if not same(case.results(compiled), expected):
            wrong.append(seed)
    graph._plan = own
    return wrong


def schedules(case: Case, randoms: int) -> Iterator[tuple[str, Plan]]:
    """All schedules of a case, each once."""
    seen: list[Plan] = []
    for name, text in FORCED.items():
        try:
            plan = case.planned(text).plan
        except planning.PlanFileError as error:  # a feature that is possible nowhere
            print(f"    {name}: {str(error).splitlines()[0]}")
            continue
        bare = dataclasses.replace(plan, decisions=(), predicted_us=None, serial_us=None, lower_bound_us=None)
        if bare not in seen:
            seen.append(bare)
            yield name, plan
    yield from random_plans(case, randoms)


def load(name: str, form: str, phase: str) -> Case:
    """The zoo's tiny ``name`` with a cache of random numbers."""
    from cannopy.frontend import sources

    loaded = sources.load(name, size="tiny", form=form)  # type: ignore[arg-type]
    args, kwargs = loaded.make_inputs(phase)  # type: ignore[arg-type]
    state.prepare_state(loaded.model, args, kwargs, method=loaded.method_of(phase))  # type: ignore[arg-type]
    fill((args, kwargs))
    return Case(loaded.model, loaded.method_of(phase), args, kwargs, phase)  # type: ignore[arg-type]


def main() -> int:
    """Print a line per schedule; 1 when any differs."""
    from cannopy.models import zoo

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", default=list(zoo.names()))
    parser.add_argument("--form", nargs="+", default=["stock", "serving"])
    parser.add_argument("--phase", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--random", type=int, default=4)
    parser.add_argument("--orders", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for name, form, phase in ((n, f, p) for n in given.model for f in given.form for p in given.phase):
        case = load(name, form, phase)
        plain = case.results(case.build(None, "torchair"))
        for title, plan in schedules(case, given.random):
            try:
                compiled = case.build(plan, "torchair")
            except (PlanLostError, ValueError) as error:
                failed, verdict = failed + 1, f"LOST {error}"
            else:
                differs = not same(case.results(compiled), plain)
                orders = in_other_orders(case, compiled, plain, given.orders)
                failed += bool(differs or orders)
                verdict = "DIFFERS" if differs else f"DIFFERS in orders {orders}" if orders else "the same"
            print(f"{name:14} {form:8} {phase:8} {title:22} {len(plan.streams)} streams {len(plan.waits):3} waits "
                  f"{len(plan.prefetches):3} prefetches {len(plan.regions):3} regions  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
