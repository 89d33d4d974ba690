"""The chain of kernels that a step is as long as."""

from __future__ import annotations

from cannopy.stream_scheduler.simulator import Schedule, Span, Trace

_SLACK_US = 1e-6


def critical_path(schedule: Schedule, trace: Trace) -> list[str]:
    """Names of the tasks on the critical path of ``trace`` in order of time.

    It is walked back from the task that ends last. What held a task up is the one that ended last among what it waits
    for: its dependencies, the task before it in its stream and, where it started later than these allow, whatever gave
    its cores back just before.
    """
    if not trace.spans:
        return []
    before = _before(schedule)
    waited = {i.task for i in trace.intervals if not i.running and i.bound == "cores"}
    spans = sorted(trace.spans.values(), key=lambda span: span.end)
    here: Span | None = spans[-1]
    path: list[str] = []
    seen: set[str] = set()
    while here is not None and here.task.name not in seen:
        name = here.task.name
        path.append(name)
        seen.add(name)
        held = [trace.spans[other] for other in (*here.task.deps, *before.get(name, ())) if other in trace.spans]
        if name in waited:
            start = here.start + _SLACK_US
            held += [span for span in spans if span.end <= start and span.task.stream != here.task.stream][-1:]
        here = max(held, key=lambda span: span.end, default=None)
    return path[::-1]


def _before(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """{task: the task before it in its stream}."""
    last: dict[str, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for task in schedule.tasks:
        found[task.name] = (last[task.stream],) if task.stream in last else ()
        last[task.stream] = task.name
    return found
