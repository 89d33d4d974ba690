"""One thing wrong with a plan, and the check that has to say so."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from cannopy.stream_scheduler.plan.model import Placement, Plan, PlannedPrefetch, SuperKernelRegion, Wait
from tests.verifier.plans import MEGABYTE, Case

Mutation = Callable[[Case, random.Random], Plan]
MUTATIONS: dict[str, tuple[str, Mutation]] = {}
"""{name: (check that rejects it, mutation)}."""


def mutation(check: str) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = (check, function)
        return function

    return register


def change(plan: Plan, node: str, **more: object) -> Plan:
    """``plan`` with one placement different."""
    placed = [dataclasses.replace(p, **more) if p.node == node else p for p in plan.placements]  # type: ignore[arg-type]
    return dataclasses.replace(plan, placements=tuple(placed))


def chosen(case: Case, pick: random.Random, kernel: str = "", **fields: object) -> Placement:
    """A placement of that kernel with those fields."""
    return pick.choice([p for p in case.plan.placements if p.node.startswith(kernel)
                        and all(getattr(p, k) == v for k, v in fields.items())])


def side(case: Case, pick: random.Random, kernel: str) -> Placement:
    return pick.choice([p for p in case.plan.placements if p.stream != "main" and p.node.startswith(kernel)])


@mutation("kernels")
def kernel_left_out(case: Case, pick: random.Random) -> Plan:
    rows = list(case.plan.placements)
    del rows[pick.randrange(len(rows))]
    return dataclasses.replace(case.plan, placements=tuple(rows))


@mutation("kernels")
def kernel_twice(case: Case, pick: random.Random) -> Plan:
    rows = list(case.plan.placements)
    return dataclasses.replace(case.plan, placements=(*rows, pick.choice(rows)))


@mutation("kernels")
def wait_for_an_unknown_kernel(case: Case, pick: random.Random) -> Plan:
    wait = Wait(pick.choice(case.plan.placements).node, "gone")
    return dataclasses.replace(case.plan, waits=(*case.plan.waits, wait))


@mutation("order")
def order_swapped(case: Case, pick: random.Random) -> Plan:
    rows = list(case.plan.placements)
    at = {p.node: i for i, p in enumerate(rows)}
    pairs = [(at[d], at[t.name]) for t in case.schedule.tasks for d in t.deps]
    i, j = pick.choice(pairs)
    rows[i], rows[j] = rows[j], rows[i]
    return dataclasses.replace(case.plan, placements=tuple(rows))


@mutation("order")
def wait_for_something_later(case: Case, pick: random.Random) -> Plan:
    rows = case.plan.placements
    i = pick.randrange(len(rows))
    wait = Wait(rows[i].node, rows[pick.randrange(i, len(rows))].node)
    return dataclasses.replace(case.plan, waits=(*case.plan.waits, wait))


@mutation("core limit")
def limit_that_the_chip_has_not(case: Case, pick: random.Random) -> Plan:
    wrong = pick.choice([(0, 0), (16, 31), (25, 50), (-4, -8), (8, 8), (24, 24)])
    return change(case.plan, pick.choice([p for p in case.plan.placements if p.cores]).node, cores=wrong)


@mutation("concurrent core limits")
def cores_oversubscribed(case: Case, pick: random.Random) -> Plan:
    one = side(case, pick, "bf16_matmul")
    cube = pick.randint((one.cores or (0, 0))[0] + 1, 24)
    return change(case.plan, one.node, cores=(cube, 2 * cube))


@mutation("hang")
def wait_between_sorts_dropped(case: Case, pick: random.Random) -> Plan:
    sorts = [w for w in case.plan.waits if w.node.startswith("moe_init_routing")]
    gone = pick.choice(sorts)
    return dataclasses.replace(case.plan, waits=tuple(w for w in case.plan.waits if w is not gone))


@mutation("collective order")
def collective_in_another_stream(case: Case, pick: random.Random) -> Plan:
    node = chosen(case, pick, pick.choice(("all_gather", "reduce_scatter"))).node
    return change(case.plan, node, stream="side9")


@mutation("memory")
def copy_back_moved_before_the_reader_ends(case: Case, pick: random.Random) -> Plan:
    gone = pick.choice([w for w in case.plan.waits if w.node.startswith("cache_update")])
    return dataclasses.replace(case.plan, waits=tuple(w for w in case.plan.waits if w is not gone))


@mutation("joined streams")
def stream_not_joined(case: Case, pick: random.Random) -> Plan:
    """The last kernel of a side stream, for which nothing waits, in a stream of its own."""
    last = [w for w in case.plan.waits if w.on.startswith("copy")]
    gone = pick.choice(last)
    plan = dataclasses.replace(case.plan, waits=tuple(w for w in case.plan.waits if w is not gone))
    return change(plan, gone.on, stream="side9")


@mutation("streams")
def too_many_streams(case: Case, pick: random.Random) -> Plan:
    plan = case.plan
    for i, p in enumerate(pick.sample([p for p in plan.placements if p.cores is None and p.super_kernel is None], 5)):
        plan = change(plan, p.node, stream=f"extra{i}")
    return plan


def fetched(case: Case, pick: random.Random, **more: object) -> Plan:
    fetches = list(case.plan.prefetches)
    i = pick.randrange(len(fetches))
    fetches[i] = dataclasses.replace(fetches[i], **more)  # type: ignore[arg-type]
    return dataclasses.replace(case.plan, prefetches=tuple(fetches))


@mutation("prefetch")
def prefetch_too_large(case: Case, pick: random.Random) -> Plan:
    return fetched(case, pick, bytes=pick.choice((0, -1, 8 * MEGABYTE + 1, 1 << 40)))


@mutation("prefetch")
def prefetch_too_late(case: Case, pick: random.Random) -> Plan:
    fetches = list(case.plan.prefetches)
    i = pick.randrange(len(fetches))
    rows = [p.node for p in case.plan.placements]
    after = rows[pick.randrange(rows.index(fetches[i].before), len(rows))]
    fetches[i] = dataclasses.replace(fetches[i], after=after, stream=case.plan.by_node[after].stream)
    return dataclasses.replace(case.plan, prefetches=tuple(fetches))


@mutation("prefetch")
def prefetch_from_another_stream(case: Case, pick: random.Random) -> Plan:
    return fetched(case, pick, stream="side1")


@mutation("prefetch")
def prefetch_twice(case: Case, pick: random.Random) -> Plan:
    one = pick.choice(case.plan.prefetches)
    more = [dataclasses.replace(one, bytes=8 * MEGABYTE)] * 2
    return dataclasses.replace(case.plan, prefetches=(*case.plan.prefetches, *more))


@mutation("prefetch")
def prefetch_of_what_is_written(case: Case, pick: random.Random) -> Plan:
    return fetched(case, pick, weight="cache", bytes=1)


@mutation("prefetch")
def prefetch_of_what_the_kernel_does_not_read(case: Case, pick: random.Random) -> Plan:
    one = pick.choice(case.plan.prefetches)
    weights = sorted(name for name in case.facts.sizes if name not in (one.weight, "cache"))
    wrong = PlannedPrefetch(pick.choice(weights), MEGABYTE, one.after, one.before, one.stream)
    return dataclasses.replace(case.plan, prefetches=(*case.plan.prefetches, wrong))


@mutation("SuperKernel")
def region_over_two_limits(case: Case, pick: random.Random) -> Plan:
    inside = pick.choice([p for p in case.plan.placements if p.super_kernel])
    cube = (inside.cores or (24, 48))[0]
    less = pick.randint(1, cube - 1)
    return change(case.plan, inside.node, cores=(less, 2 * less))


@mutation("SuperKernel")
def region_over_two_streams(case: Case, pick: random.Random) -> Plan:
    return change(case.plan, pick.choice([p for p in case.plan.placements if p.super_kernel]).node, stream="side1")


@mutation("SuperKernel")
def region_with_a_hole(case: Case, pick: random.Random) -> Plan:
    rows = case.plan.placements
    region = pick.choice(case.plan.regions).name
    inside = [p.node for p in rows if p.super_kernel == region]
    return change(case.plan, pick.choice(inside[1:-1]), super_kernel=None)


@mutation("SuperKernel")
def region_that_is_not_defined(case: Case, pick: random.Random) -> Plan:
    return change(case.plan, pick.choice(case.plan.placements).node, super_kernel="nowhere")


@mutation("SuperKernel")
def region_of_nothing(case: Case, pick: random.Random) -> Plan:
    return dataclasses.replace(case.plan, regions=(*case.plan.regions, SuperKernelRegion(f"empty{pick.random()}")))


@mutation("SuperKernel")
def region_with_a_kernel_that_does_not_fuse(case: Case, pick: random.Random) -> Plan:
    name = f"more{pick.randint(0, 9)}"
    plan = dataclasses.replace(case.plan, regions=(*case.plan.regions, SuperKernelRegion(name)))
    return change(plan, chosen(case, pick, "embedding").node, super_kernel=name)


@mutation("hang")
def region_waits_inside_for_what_it_keeps_from_starting(case: Case, pick: random.Random) -> Plan:
    """A kernel of the side branch comes before the region and has no limit, nor has the region, whose last kernel then
    waits for it."""
    rows = list(case.plan.placements)
    region = pick.choice(case.plan.regions).name
    inside = [p.node for p in rows if p.super_kernel == region]
    norm = rows.index(next(p for p in rows if p.node == inside[0])) - 1
    other = next(p for p in rows[norm:] if p.node.startswith("bf16_matmul"))
    rows.remove(other)
    rows.insert(norm + 1, other)
    free = {other.node, *inside}
    placed = [dataclasses.replace(p, cores=None) if p.node in free else p for p in rows]
    waits = (*case.plan.waits, Wait(pick.choice(inside[1:]), other.node))
    return dataclasses.replace(case.plan, placements=tuple(placed), waits=waits)
