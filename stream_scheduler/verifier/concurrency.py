"""Checks of what runs at the same time: cores, hangs, collectives, memory, and that everything ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from importlib import resources

import yaml

from cannopy.stream_scheduler.plan.model import Cores
from cannopy.stream_scheduler.simulator.schedule import MAIN
from cannopy.stream_scheduler.verifier.violation import Subject, Violation

COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "moe_dispatch", "moe_combine"})
"""Kernels in which the dies of a group wait for each other."""


@functools.cache
def gang_kernels() -> dict[str, str]:
    """{kernel: why its cores must all be there at once}."""
    text = resources.files(__package__).joinpath("gangs.yaml").read_text(encoding="utf-8")
    return {str(name): str(why) for name, why in yaml.safe_load(text).items()}


def core_limits(subject: Subject) -> list[Violation]:
    """Every limit is one that the die has, and limits of kernels that can run at the same time fit into it."""
    chip = (subject.hardware.cube_cores, subject.hardware.vector_cores)
    ratio = chip[1] // chip[0]
    found = []
    for p in subject.plan.placements:
        if p.cores is None:
            continue
        cube, vector = p.cores
        if not (1 <= cube <= chip[0] and vector == ratio * cube):
            found.append(Violation("core limit", (p.node,), f"{p.node} is limited to {_text(p.cores)}; expected 1 to "
                                   f"{chip[0]} cube cores and {ratio} vector cores for each"))
    if found:
        return found
    limited = [p.node for p in subject.plan.placements if p.cores is not None]
    for group in _overlapping(subject, limited, lambda node: subject.placements[node].cores or chip, chip):
        total = tuple(sum((subject.placements[n].cores or chip)[i] for n in group) for i in (0, 1))
        found.append(Violation("concurrent core limits", group, f"{_listed(subject, group)} can run at the same time "
                               f"and may hold {_text(total)}; the die has {_text(chip)}. Lower the limits or order "
                               "them with a wait"))
    return found


def gangs(subject: Subject) -> list[Violation]:
    """Kernels that need all their cores at once can have them, whatever runs beside them."""
    why = gang_kernels()
    chip = (subject.hardware.cube_cores, subject.hardware.vector_cores)
    nodes = [p.node for p in subject.plan.placements if subject.kernel(p.node) in why]
    found = []
    for group in _overlapping(subject, nodes, subject.cores, chip):
        reasons = "; ".join(f"{n} {why[subject.kernel(n)]}" for n in group)
        found.append(Violation("hang", group, f"{_listed(subject, group)} can run at the same time and need more than "
                               f"the {_text(chip)} of the die together: {reasons}. Limit their cores or order them"))
    return found


def _overlapping(subject: Subject, nodes: Iterable[str], cores: Callable[[str], Cores],
                 chip: Cores) -> Iterator[tuple[str, ...]]:
    """For each of ``nodes``, one smallest set of it and later ones in other streams that can all run at once and hold
    more than ``chip``, if there is any."""
    names, order = list(nodes), subject.order
    bits = 0
    for name in names:
        bits |= 1 << order.position[name]
    for name in names:
        own = bits & ~order.in_stream[subject.placements[name].stream]
        found = _exceeding(subject, (name,), order.concurrent(name, own), cores, chip)
        if found:
            yield found


def _exceeding(subject: Subject, group: tuple[str, ...], others: int, cores: Callable[[str], Cores],
               chip: Cores) -> tuple[str, ...]:
    """``group`` and as many of ``others``, which are concurrent with all of it, as exceed ``chip``; () without."""
    order, held = subject.order, [sum(cores(n)[i] for n in group) for i in (0, 1)]
    larger: list[tuple[str, int]] = []
    rest = others
    while rest:
        bit = rest & -rest
        name = order.names[bit.bit_length() - 1]
        if any(held[i] + cores(name)[i] > chip[i] for i in (0, 1)):
            return (*group, name)
        larger.append((name, bit))
        rest ^= bit
    for name, _ in larger:
        streams = order.in_stream[subject.placements[name].stream]
        found = _exceeding(subject, (*group, name), order.concurrent(name, others & ~streams), cores, chip)
        if found:
            return found
    return ()


def collectives(subject: Subject) -> list[Violation]:
    """Collectives of one group stand in one stream and in the order of the graph, so that every die starts them in the
    same order."""
    first: dict[str, str] = {}
    last: dict[str, str] = {}
    found = []
    place = {node: i for i, node in enumerate(subject.tasks)}
    for p in subject.plan.placements:
        group = subject.facts.groups.get(p.node)
        if group is None and subject.kernel(p.node) not in COLLECTIVES:
            continue
        name = group or "of the whole deployment"
        other = first.setdefault(name, p.node)
        stream = subject.placements[other].stream
        if stream != p.stream:
            found.append(Violation("collective order", (other, p.node), f"{other} and {p.node} share the group {name} "
                                   f"and are in the streams {stream} and {p.stream}; dies could start them in "
                                   "different orders and wait for each other. Put them into one stream"))
        before = last.get(name)
        if group is not None and before is not None and place[before] > place[p.node]:
            found.append(Violation("collective order", (before, p.node), f"{before} and {p.node} share the group {name}"
                                   " and stand in the graph the other way round; other dies could start them as there "
                                   "and wait for ever. Leave them in the order of the graph"))
        last[name] = p.node
    return found


def hazards(subject: Subject) -> list[Violation]:
    """Whoever reads the old value of a buffer has ended before it is written in place."""
    found = []
    for one in subject.facts.hazards:
        reader, writer = subject.placements[one.reader], subject.placements[one.writer]
        if reader.stream == writer.stream or subject.order.ends_before(one.reader, one.writer):
            continue
        found.append(Violation("memory", (one.reader, one.writer), f"{one.reader} reads {one.buffer} in stream "
                               f"{reader.stream} while {one.writer} writes it in place in stream {writer.stream}; let "
                               f"{one.writer} wait for {one.reader}"))
    for name, buffer in subject.facts.copied.items():
        stream = subject.placements[name].stream
        if stream != MAIN:
            found.append(Violation("memory", (name,), f"{name} reads {buffer} in stream {stream}; {buffer} gets a copy "
                                   "of another input, which no kernel makes and nothing can wait for: leave it on the "
                                   "main stream"))
    return found


def joined(subject: Subject) -> list[Violation]:
    """What a side stream does is waited for by a result of the graph."""
    needed = 0
    for name in subject.facts.results:
        if name in subject.order.position:
            i = subject.order.position[name]
            needed |= subject.order.before[i] | 1 << i
    last = {p.stream: p.node for p in subject.plan.placements if p.stream != MAIN}
    return [Violation("joined streams", (node,), f"nothing waits for {node}, the last kernel of stream {stream}: the "
                      "graph could end before it does")
            for stream, node in last.items() if not needed >> subject.order.position[node] & 1]


def _listed(subject: Subject, group: tuple[str, ...]) -> str:
    return " and ".join(f"{n} ({_text(subject.cores(n))}, stream {subject.placements[n].stream})" for n in group)


def _text(cores: Iterable[int]) -> str:
    cube, vector = cores
    return f"c{cube}v{vector}"
