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
from cannopy.stream_scheduler.simulator import Span, Trace

UNKNOWN_WEIGHTS = frozenset({"grouped_matmul_bf16", "grouped_matmul_int8", "grouped_matmul_w4a8", "embedding"})
"""Kernels that read a part of their weights that depends on data."""
MIB = 1 << 20
LEAST_BYTES = MIB
"""Of a larger weight no smaller part is fetched."""
LEAST_GAIN_US = 0.5
"""Microseconds that one prefetch has to win; set by us, no published figure."""
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
    """Ways to fetch one weight: in the latest windows before its kernel, as much as each of them and L2 hold."""
    wanted = stretch.tasks[target].weights[weight]
    whole = min(int(wanted.bytes), stretch.first[0].options.sizes.get(wanted.name, int(wanted.bytes)))
    start = trace.spans[stretch.tasks[target].name].start
    choices = []
    for after, opened in _windows(stretch, trace, target)[-MOST_WINDOWS:]:
        planned = sum(f.bytes for f in found
                      if trace.spans[stretch.tasks[f.target].name].start > opened
                      and trace.spans[stretch.tasks[f.after].name].end <= start)
        amount = min(whole, int(stretch.machine.l2_bytes) - planned, int(_idle_bytes(stretch, trace, opened, start)))
        if amount < whole:
            amount = amount // MIB * MIB
        if amount >= min(LEAST_BYTES, whole):
            choices.append(Fetch(target, weight, amount, after))
    return choices


def _busy(stretch: Stretch, span: Span) -> bool:
    """Whether a kernel reads so much that it leaves no window."""
    return span.hbm_bytes > stretch.machine.prefetch_rate * BUSY * span.us


def _windows(stretch: Stretch, trace: Trace, target: int) -> list[tuple[int, float]]:
    """(task of the first layer, its end) where HBM becomes idle, of tasks that are sure to come before ``target``."""
    before = stretch.before[target]
    spans = [trace.spans[stretch.tasks[i].name] for i in stretch.first[1].order]
    found = []
    closed = True
    for i in stretch.first[1].order:
        if not before >> i & 1:
            continue
        span = trace.spans[stretch.tasks[i].name]
        closed = closed or _busy(stretch, span)
        behind = min((s for s in spans if s.start >= span.end - 1e-6), key=lambda s: s.start, default=None)
        opens = behind is None or not _busy(stretch, behind) or behind.task.name == stretch.tasks[target].name
        if closed and opens:
            found.append((i, span.end))
            closed = False
    return found


def _idle_bytes(stretch: Stretch, trace: Trace, start: float, end: float) -> float:
    """Bytes that the prefetch engine could move from ``start`` until ``end``, or until a kernel that reads much starts,
    beside what runs."""
    machine = stretch.machine
    end = min([end, *(s.start for s in trace.spans.values() if s.end > start and _busy(stretch, s))])
    if end <= start:
        return 0.0
    reads = [(i.start, i.end, i.hbm_rate) for i in trace.intervals if i.running and i.end > start and i.start < end]
    fetched = [(p.start, p.end) for p in trace.prefetches if p.end > start and p.start < end]
    times = sorted({start, end, *(t for s, e, *_ in (*reads, *fetched) for t in (s, e) if start < t < end)})
    total = 0.0
    for a, b in itertools.pairwise(times):
        if not any(s <= a and e >= b for s, e in fetched):
            used = sum(rate for s, e, rate in reads if s <= a and e >= b)
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
