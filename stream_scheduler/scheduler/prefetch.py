"""Weights into L2 while HBM is idle.

A window opens when a kernel that reads much ends, or with the layer, and lasts to the next such kernel. Weights of the
kernels behind it are fetched in the order in which they are needed, each once, as much as the idle bandwidth of the
time until then holds and L2 has room for. A kernel whose weights are there reads little, so what was its time becomes
part of the window for the next one. Expert weights are left out: which of them are read is not known before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cannopy.stream_scheduler.scheduler.stretch import Fetch, Stretch
from cannopy.stream_scheduler.simulator import Trace

UNKNOWN_WEIGHTS = frozenset({"grouped_matmul_bf16", "grouped_matmul_int8", "grouped_matmul_w4a8", "embedding"})
"""Kernels that read a part of their weights that depends on data."""
MIB = 1 << 20
LEAST_BYTES = MIB
LEAST_GAIN_US = 0.5
BUSY = 0.5
"""A kernel that takes this share of the prefetch engine's rate leaves it no window."""
MOST_WINDOWS = 3
"""Windows that are tried for one weight, the latest ones."""


def prefetches(stretch: Stretch, forbidden: frozenset[int] = frozenset(), wanted: frozenset[int] = frozenset()
               ) -> list[Fetch]:
    """The prefetches that make ``stretch`` faster, issued in its first layer. Tasks by place: ``forbidden`` get none,
    ``wanted`` get one even where nothing is gained."""
    found: list[Fetch] = []
    trace = stretch.run()
    if trace is None:
        return found
    warm = {i for i, _ in stretch.warm}
    for target in _targets(stretch, trace, forbidden | warm):
        for weight in range(len(stretch.tasks[target].weights)):
            best, best_us = None, trace.us - LEAST_GAIN_US
            for fetch in _choices(stretch, trace, found, target, weight):
                us = stretch.time([*found, fetch])
                if us < best_us or (best is None and target in wanted):
                    best, best_us = fetch, us
            if best is not None:
                found = _sorted(stretch, [*found, best])
                trace = stretch.run(found) or trace
    return _pruned(stretch, found, wanted)


def _targets(stretch: Stretch, trace: Trace, left_out: frozenset[int] | set[int]) -> list[int]:
    """Tasks that would be faster with their weights in L2, in the order of their starts."""
    found = []
    for i, task in enumerate(stretch.tasks):
        if i in left_out or not task.weights or task.load.kernel in UNKNOWN_WEIGHTS:
            continue
        amount = sum(w.bytes for w in task.weights)
        cores = task.load.cores
        gain = task.load.profile(*cores, 0.0).us - task.load.profile(*cores, amount).us
        if gain > LEAST_GAIN_US:
            found.append(i)
    return sorted(found, key=lambda i: trace.spans[stretch.tasks[i].name].start)


def _choices(stretch: Stretch, trace: Trace, found: Sequence[Fetch], target: int, weight: int) -> list[Fetch]:
    """Ways to fetch one weight: from the latest windows before it, as much as fits, and all of it."""
    whole = int(stretch.tasks[target].weights[weight].bytes)
    start = trace.spans[stretch.tasks[target].name].start
    choices = []
    for after, opened in _windows(stretch, trace, target)[-MOST_WINDOWS:]:
        planned = sum(f.bytes for f in found
                      if trace.spans[stretch.tasks[f.target].name].start > opened
                      and trace.spans[stretch.tasks[f.after].name].end <= start)
        room = int(stretch.machine.l2_bytes) - planned
        fits = min(whole, room, int(_idle_bytes(stretch, trace, opened, start)))
        if fits < whole:
            fits = fits // MIB * MIB
        for amount in dict.fromkeys((fits, min(whole, room))):
            if amount >= min(LEAST_BYTES, whole) and amount > 0:
                choices.append(Fetch(target, weight, amount, after))
    return choices


def _windows(stretch: Stretch, trace: Trace, target: int) -> list[tuple[int, float]]:
    """(task of the first layer, its end) where HBM becomes idle, of tasks that are sure to come before ``target``."""
    before = stretch.before[target]
    rate = stretch.machine.prefetch_rate * BUSY
    found = []
    pending = True
    for i in stretch.first[1].order:
        if not before >> i & 1:
            continue
        span = trace.spans[stretch.tasks[i].name]
        busy = span.hbm_bytes > rate * span.us
        if busy:
            pending = True
        follows = [j for j in stretch.first[1].order if trace.spans[stretch.tasks[j].name].start >= span.end - 1e-6]
        nexts = min(follows, key=lambda j: trace.spans[stretch.tasks[j].name].start, default=None)
        following = trace.spans[stretch.tasks[nexts].name] if nexts is not None else None
        quiet = following is None or following.hbm_bytes <= rate * following.us
        if pending and (quiet or nexts == target):
            found.append((i, span.end))
            pending = False
    return found


def _idle_bytes(stretch: Stretch, trace: Trace, start: float, end: float) -> float:
    """Bytes that the prefetch engine could move from ``start`` to ``end`` beside what runs."""
    machine = stretch.machine
    moved = [(i.start, i.end, i.hbm_rate) for i in trace.intervals if i.running and i.end > start and i.start < end]
    moved += [(p.start, p.end, p.bytes / (p.end - p.start)) for p in trace.prefetches
              if p.end > max(start, p.start) and p.start < end]
    times = sorted({start, end, *(t for s, e, _ in moved for t in (s, e) if start < t < end)})
    total = 0.0
    for a, b in itertools.pairwise(times):
        used = sum(rate for s, e, rate in moved if s <= a and e >= b)
        total += (b - a) * max(0.0, min(machine.prefetch_rate, machine.hbm_rate - used))
    return total


def _pruned(stretch: Stretch, found: list[Fetch], wanted: frozenset[int]) -> list[Fetch]:
    """Without the prefetches that no longer pay once the others are there."""
    us = stretch.time(found)
    for fetch in list(found):
        left = [f for f in found if f != fetch]
        if fetch.target not in wanted and (time := stretch.time(left)) < us + LEAST_GAIN_US / 2:
            found, us = left, time
    return found


def _sorted(stretch: Stretch, found: list[Fetch]) -> list[Fetch]:
    """In the order in which they are issued."""
    place = {i: n for n, i in enumerate(stretch.order)}
    return sorted(found, key=lambda f: (place[f.after], place[f.target], f.weight))
