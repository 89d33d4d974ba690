"""Checks of SuperKernel regions: kernels that fuse, in a row, in one stream and under one limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cannopy.stream_scheduler.plan.model import Cores, Placement
from cannopy.stream_scheduler.verifier.violation import Subject, Violation


def super_kernels(subject: Subject, eligible: Callable[[str], str] | None) -> list[Violation]:
    """The violations of all regions of a plan."""
    plan = subject.plan
    defined = {region.name: region for region in plan.regions}
    members: dict[str, list[Placement]] = {name: [] for name in defined}
    found = []
    for p in plan.placements:
        if p.super_kernel is None:
            continue
        if p.super_kernel not in defined:
            found.append(Violation("SuperKernel", (p.node,), f"{p.node} is in the region {p.super_kernel!r}, which the "
                                                             "plan does not define"))
            continue
        members[p.super_kernel].append(p)
        why = eligible(subject.kernel(p.node)) if eligible else ""
        if why:
            found.append(Violation("SuperKernel", (p.node,), f"{p.node} cannot be inside a SuperKernel: {why}"))
    if len(defined) != len(plan.regions):
        found.append(Violation("SuperKernel", (), "two regions have one name"))
    for name, inside in members.items():
        if not inside:
            found.append(Violation("SuperKernel", (), f"the region {name!r} has no kernel"))
        elif not defined[name].stream_fusion:
            found += _one_place(name, inside)
            found += _in_a_row(subject, name, inside)
    if not found:
        found += _inner_waits(subject, {n: inside for n, inside in members.items() if not defined[n].stream_fusion})
    return found


def _one_place(name: str, inside: list[Placement]) -> list[Violation]:
    first = inside[0]
    found = []
    for p in inside[1:]:
        if p.stream != first.stream:
            found.append(Violation("SuperKernel", (first.node, p.node), f"the region {name!r} spans two streams: "
                                   f"{first.node} is in {first.stream}, {p.node} in {p.stream}; expected one, or the "
                                   "option stream-fusion=1"))
        elif p.cores != first.cores:
            found.append(Violation("SuperKernel", (first.node, p.node), f"the region {name!r} has two limits: "
                                   f"{first.node} {_text(first.cores)}, {p.node} {_text(p.cores)}; expected one, or "
                                   "the option stream-fusion=1"))
    return found


def _in_a_row(subject: Subject, name: str, inside: list[Placement]) -> list[Violation]:
    """No other kernel of the stream stands between the first and the last."""
    stream = inside[0].stream
    row = [p for p in subject.plan.placements if p.stream == stream]
    at = {p.node: i for i, p in enumerate(row)}
    places = [at[p.node] for p in inside if p.stream == stream]
    between = [row[i] for i in range(min(places), max(places) + 1) if row[i].super_kernel != name]
    return [Violation("SuperKernel", (p.node,), f"{p.node} stands inside the region {name!r} and is not part of it; "
                      "end the region before it and open another one behind it") for p in between[:1]]


def _inner_waits(subject: Subject, regions: dict[str, list[Placement]]) -> list[Violation]:
    """A region has its cores from the first kernel to the last. What its other kernels wait for, and what need not have
    ended before the first, finds cores beside all regions that wait for it, and nothing that finds none is before it in
    the queue for them."""
    waiting: dict[str, list[tuple[str, str]]] = {}
    for name, inside in regions.items():
        for node, other in _awaited_inside(subject, inside):
            waiting.setdefault(other, []).append((name, node))
    of_kernel = {p.node: inside for inside in regions.values() for p in inside}
    chip = (subject.hardware.cube_cores, subject.hardware.vector_cores)
    found = []
    for other, who in waiting.items():
        needed = _held(subject, of_kernel.get(other, [subject.placements[other]]))
        cores = [_held(subject, regions[name]) for name, _ in who]
        held = sum(c for c, _ in cores), sum(v for _, v in cores)
        left = chip[0] - held[0], chip[1] - held[1]
        first = other if _exceeds(needed, left) else _before_it(subject, other, needed, left, regions, who)
        if first:
            name, node = who[0]
            holders = " and ".join(repr(n) for n, _ in who)
            wanted = needed if first == other else _held(subject, of_kernel.get(first, [subject.placements[first]]))
            behind = "" if first == other else f"; {other} can be behind it in the queue for cores"
            found.append(Violation("hang", (node, other) if first == other else (node, other, first),
                                   f"{node} inside the region {name!r} waits for {other}, and {first} "
                                   f"needs {_text(wanted)}, while {holders} {'hold' if len(who) > 1 else 'holds'} "
                                   f"{_text(held)} of the {_text(chip)} of the die{behind}: {other} would never "
                                   f"start. End the region before {node}, limit the cores, or let "
                                   f"{regions[name][0].node} wait for {other}"))
    return found


def _before_it(subject: Subject, other: str, needed: Cores, left: Cores, regions: dict[str, list[Placement]],
               who: list[tuple[str, str]]) -> str:
    """A kernel that finds no cores in ``left`` and can be waiting for them when ``other`` gets in the queue for cores
    of one kind with it; "" without."""
    order, inner = subject.order, {p.node: inside for inside in regions.values() for p in inside}
    over = {p.node for p in subject.plan.placements if order.ends_before(p.node, other)
            or any(order.ends_before(p.node, regions[name][0].node) or order.ends_before(node, p.node)
                   for name, node in who)}
    for p in subject.plan.placements:
        region = inner.get(p.node, [p])
        if p.node == other or p.node in over or order.ends_before(other, p.node) or region[0].node != p.node:
            continue
        if any(p in regions[name] for name, _ in who):
            continue
        wanted = _held(subject, region)
        if _exceeds(wanted, left) and any(wanted[i] and needed[i] for i in (0, 1)):
            return p.node
    return ""


def _exceeds(needed: Cores, left: Cores) -> bool:
    return any(needed[i] and needed[i] > left[i] for i in (0, 1))


def _awaited_inside(subject: Subject, inside: list[Placement]) -> Iterator[tuple[str, str]]:
    """(kernel of a region but the first, kernel of another stream that it waits for and the first one does not)."""
    order, first = subject.order, inside[0].node
    early = order.before[order.position[first]] | order.in_stream[inside[0].stream]
    for p in inside[1:]:
        rest = order.before[order.position[p.node]] & ~early
        early |= rest
        while rest:
            bit = rest & -rest
            rest ^= bit
            yield p.node, order.names[bit.bit_length() - 1]


def _held(subject: Subject, inside: list[Placement]) -> Cores:
    cores = [subject.cores(p.node) for p in inside]
    return max(c for c, _ in cores), max(v for _, v in cores)


def _text(cores: Cores | None) -> str:
    return "none" if cores is None else f"c{cores[0]}v{cores[1]}"
