"""Checks of prefetches: of a weight that is only read, within it, once, in time, where what they follow runs."""

from __future__ import annotations

from cannopy.stream_scheduler.plan.model import PlannedPrefetch
from cannopy.stream_scheduler.verifier.violation import Subject, Violation


def prefetches(subject: Subject) -> list[Violation]:
    """The violations of all prefetches of a plan."""
    found: list[Violation] = []
    total: dict[tuple[str, str], int] = {}
    for fetch in subject.plan.prefetches:
        wrong = _wrong(subject, fetch)
        if not wrong:
            key = (fetch.weight, fetch.before)
            total[key] = total.get(key, 0) + fetch.bytes
            size = subject.facts.sizes.get(fetch.weight)
            if total[key] > fetch.bytes and size is not None and total[key] > size:
                wrong = f"with the others it has {total[key]} bytes; expected {size} at most: it is fetched twice"
        if wrong:
            found.append(Violation("prefetch", (fetch.after, fetch.before), f"the prefetch of {fetch.weight} after "
                                   f"{fetch.after} for {fetch.before}: {wrong}"))
    return found


def _wrong(subject: Subject, fetch: PlannedPrefetch) -> str:
    size = subject.facts.sizes.get(fetch.weight)
    reads = {weight.name for weight in subject.tasks[fetch.before].weights}
    stream = subject.placements[fetch.after].stream
    if size is None:
        return "the graph has no such input"
    if fetch.weight in subject.facts.written:
        return "the graph writes it, and what is fetched could be its old value"
    if fetch.weight not in reads:
        return f"{fetch.before} does not read it"
    if not 0 < fetch.bytes <= size:
        return f"{fetch.bytes} bytes; expected 1 to {size}, its size"
    if not subject.order.ends_before(fetch.after, fetch.before):
        return f"{fetch.after} need not have ended when {fetch.before} starts; fetch it after something earlier"
    if fetch.stream != stream:
        return f"it is issued in stream {fetch.stream}, and {fetch.after} runs in {stream}"
    return ""
