"""Discrete-event simulation of a schedule on one die.

Streams run in order. A kernel starts when what it waits for has ended, its launch gap is over and its cores are free;
who waits longest is first in line for a pool, nobody overtakes. Running kernels and the prefetch engine divide the HBM
bandwidth; speeds are set anew at every event. A kernel that finds part of its weights in L2 reads less from HBM.
Inside a SuperKernel each kernel but the first waits for a barrier and saves its own start, and the cores are held from
the first kernel to the last. The idle time between kernels stays: a profile of kernel durations shows the saved starts,
and networks gain no more than those (8.75 us a layer in Hy3, nothing in LongCat-Flash-Lite).
The same schedule gives the same trace.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from dataclasses import dataclass

from cannopy.stream_scheduler.simulator.l2 import L2
from cannopy.stream_scheduler.simulator.machine import Machine
from cannopy.stream_scheduler.simulator.queues import Queues, ScheduleError, arrange
from cannopy.stream_scheduler.simulator.schedule import Prefetch, Profile, Schedule
from cannopy.stream_scheduler.simulator.sharing import Reader, speeds
from cannopy.stream_scheduler.simulator.trace import Interval, PrefetchSpan, Span, Trace

_EPSILON = 1e-9


def simulate(schedule: Schedule, machine: Machine) -> Trace:
    """Run ``schedule`` on ``machine``; `ScheduleError` when it cannot be run or hangs."""
    return _Run(schedule, machine).run()


def duration(schedule: Schedule, machine: Machine) -> float:
    """``simulate(schedule, machine).us`` in less time: nothing of the trace is kept."""
    return _Run(schedule, machine, traced=False).run().us


@dataclass
class _Running:
    """A kernel under way: ``left`` of its ``us`` microseconds at full speed; over when no more than ``over`` is left
    or what the clock can tell apart."""

    profile: Profile
    us: float
    left: float
    start: float
    demand: float
    resident: float
    mark: float
    reader: Reader
    over: float
    speed: float = 1.0


@dataclass
class _Fetch:
    """The prefetch under way."""

    prefetch: Prefetch
    left: float
    start: float
    speed: float = 1.0


class _Run:
    def __init__(self, schedule: Schedule, machine: Machine, traced: bool = True) -> None:
        self.machine, self.traced = machine, traced
        self.changed = True  # who reads HBM, since speeds were set
        self.queues: Queues = arrange(schedule, machine)
        self.open = list(self.queues.open)
        self.end: list[float] = [0.0] * len(self.queues.tasks)
        self.ready: list[tuple[float, int]] = []
        self.waiting: list[tuple[float, int]] = []
        self.running: dict[int, _Running] = {}
        self.free = [machine.cube_cores, machine.vector_cores]
        self.fetch: _Fetch | None = None
        self.fetch_queue: list[Prefetch] = []
        self.fetches: dict[str, list[Prefetch]] = {}
        for prefetch in schedule.prefetches:
            self.fetches.setdefault(prefetch.after, []).append(prefetch)
        self.l2 = L2(machine.l2_bytes)
        self.now = 0.0
        self.ended: set[int] = set()
        self.trace = Trace(host_us=schedule.graphs * machine.graph_us)
        self.used: dict[str, float] = {}

    def run(self) -> Trace:
        for i, count in enumerate(self.open):
            if not count:
                self._get_ready(i)
        while len(self.ended) < len(self.open):
            if self.waiting:
                self._start_waiting()
            if self.changed:
                self._set_speeds()
            then = self._next_event()
            if then is None:
                raise ScheduleError(self._hang())
            self._advance(then)
            self._finish()
        self.trace.us = max(self.end, default=0.0)
        if not self.traced:
            return self.trace
        self.trace.evicted_bytes = self.l2.evicted
        left = dict(self.used)
        for n, span in enumerate(self.trace.prefetches):
            used = min(left.get(span.weight, 0.0), span.bytes)
            left[span.weight] = left.get(span.weight, 0.0) - used
            self.trace.prefetches[n] = dataclasses.replace(span, used=used)
        return self.trace

    def _get_ready(self, i: int) -> None:
        """All that task ``i`` waits for has ended: it is ready after events and gap."""
        queues, machine = self.queues, self.machine
        task, previous = queues.tasks[i], queues.before[i]
        in_stream = self.end[previous] if previous is not None else 0.0
        start = in_stream
        for name in task.deps:
            j = queues.index[name]
            delay = 0.0 if queues.tasks[j].stream == task.stream else machine.event_us
            start = max(start, self.end[j] + delay)
        gap = machine.gap_us + (machine.sync_us if self._inside(i) else 0.0)
        if self.traced:
            self._note(i, in_stream, start, "event")
            self._note(i, start, start + gap, "launch")
        heapq.heappush(self.ready, (start + gap, i))

    def _inside(self, i: int) -> bool:
        """Whether ``i`` is in a SuperKernel and not the first there."""
        return self.queues.region[i] not in (None, i)

    def _note(self, i: int, start: float, end: float, bound: str) -> None:
        if end > start + _EPSILON:
            task = self.queues.tasks[i]
            self.trace.intervals.append(Interval(task.name, task.stream, start, end, bound, running=False))

    def _start_waiting(self) -> None:
        """Start every waiting task whose cores are free and that nobody before it wants."""
        blocked = [False, False]
        still = []
        free = self.free
        for ready, i in self.waiting:
            cube, vector = (0, 0) if self._inside(i) else self.queues.cores[i]
            if (cube and (blocked[0] or cube > free[0])) or (vector and (blocked[1] or vector > free[1])):
                blocked = [blocked[0] or bool(cube), blocked[1] or bool(vector)]
                still.append((ready, i))
                continue
            free[0] -= cube
            free[1] -= vector
            if self.traced:
                self._note(i, ready, self.now, "cores")
            self._start(i)
        self.waiting = still

    def _start(self, i: int) -> None:
        task = self.queues.tasks[i]
        cube, vector = task.load.cores
        if task.cores is not None:
            cube, vector = min(cube, task.cores[0]), min(vector, task.cores[1])
        resident = 0.0
        for weight in task.weights:
            found = min(self.l2.take(weight.name), weight.bytes)
            self.used[weight.name] = self.used.get(weight.name, 0.0) + found
            resident += found
        profile = task.load.profile(cube, vector, resident)
        us = profile.us
        if self._inside(i):
            us -= min(self.machine.saved_us, profile.part("launch") if profile.parts else us)
        us = max(us, _EPSILON)
        held = self.queues.cores[i]
        load = profile.part("hbm")
        reader = Reader(us, profile.hbm_bytes, min(profile.load_us, us), profile.hbm_bytes / load if load else 0.0,
                        self.machine.core_hbm_rate * max(held[0], held[1] / 2, 1))
        self.running[i] = _Running(profile, us, us, self.now, profile.hbm_bytes / us, resident, self.now, reader,
                                   _EPSILON * max(us, 1.0))
        self.changed = True

    def _set_speeds(self) -> None:
        self.changed = False
        found = self._speeds()
        for (i, one), speed in zip(self.running.items(), found, strict=False):
            if abs(speed - one.speed) > _EPSILON:
                self._segment(i, one)
                one.speed = speed
        if self.fetch is not None:
            self.fetch.speed = found[-1]

    def _speeds(self) -> list[float]:
        """Of the running tasks, then of the prefetch."""
        if len(self.running) + (self.fetch is not None) < 2:
            return [1.0] * 2
        found = [one.reader for one in self.running.values()]
        if self.fetch is not None:
            rate = self.machine.prefetch_rate
            found.append(Reader(1.0, rate, 1.0, rate, rate))
        return speeds(found, self.machine.hbm_rate)

    def _segment(self, i: int, one: _Running) -> None:
        """Close the interval in which task ``i`` ran at one speed."""
        if self.traced and self.now > one.mark + _EPSILON:
            task = self.queues.tasks[i]
            bound = "hbm" if one.speed < 1 - _EPSILON else one.profile.bound
            cube, vector = task.load.cores
            limit = task.cores or (cube, vector)
            self.trace.intervals.append(Interval(
                task.name, task.stream, one.mark, self.now, bound, True, min(cube, limit[0]), min(vector, limit[1]),
                one.demand * one.speed,
            ))
            one.mark = self.now

    def _next_event(self) -> float | None:
        times = [self.now + one.left / one.speed for one in self.running.values()]
        if self.ready:
            times.append(self.ready[0][0])
        if self.fetch is not None:
            times.append(self.now + self.fetch.left / (self.fetch.speed * self.machine.prefetch_rate))
            if not self.running and not self.ready and self.waiting:
                return None
        return max(min(times), self.now) if times else None

    def _advance(self, then: float) -> None:
        """Move the clock; every reader's bytes pass through L2 together."""
        step = then - self.now
        self.now = then
        total = 0.0
        for one in self.running.values():
            one.left -= step * one.speed
            total += one.demand * one.speed * step
        fetch, part = self.fetch, 0.0
        if fetch is not None:
            part = min(fetch.speed * self.machine.prefetch_rate * step, fetch.left)
            fetch.left -= part
            total += part
        if total > 0:
            self.l2.fill(total, fetch.prefetch.weight if fetch is not None else None, part)

    def _finish(self) -> None:
        """Tasks and prefetches that have ended, then tasks that have become ready.

        What is left may not be less than what the clock can tell apart, or time would stand still."""
        tick = math.ulp(self.now)
        over = [i for i, one in self.running.items() if one.left <= one.over or one.left <= tick]
        for i in over:
            self._end_task(i, self.running[i])
            del self.running[i]
        fetch = self.fetch
        if fetch is not None and fetch.left <= max(
            _EPSILON * max(fetch.prefetch.bytes, 1.0), tick * self.machine.prefetch_rate
        ):
            done = fetch.prefetch
            span = PrefetchSpan(done.weight, fetch.start, self.now, done.bytes, 0.0, done.after)
            self.trace.prefetches.append(span)
            self.fetch = None
            self.changed = True
        if self.fetch is None and self.fetch_queue:
            first = self.fetch_queue.pop(0)
            self.fetch = _Fetch(first, first.bytes, self.now)
            self.changed = True
        self.changed |= bool(over)
        if not self.ready or self.ready[0][0] > self.now + _EPSILON:
            return
        while self.ready and self.ready[0][0] <= self.now + _EPSILON:
            self.waiting.append(heapq.heappop(self.ready))
        self.waiting.sort()

    def _end_task(self, i: int, one: _Running) -> None:
        queues, task = self.queues, self.queues.tasks[i]
        self._segment(i, one)
        self.end[i] = self.now
        first = queues.region[i]
        if first is None or queues.last[i]:
            held = queues.cores[i if first is None else first]
            self.free = [self.free[p] + held[p] for p in (0, 1)]
        self.ended.add(i)
        if self.traced:
            self.trace.spans[task.name] = Span(
                task, one.start, self.now, one.profile.bound, one.us, one.profile.hbm_bytes, one.resident
            )
        self.fetch_queue += self.fetches.get(task.name, ())
        for j in queues.after[i]:
            self.open[j] -= 1
            if not self.open[j]:
                self._get_ready(j)

    def _hang(self) -> str:
        names = [task.name for i, task in enumerate(self.queues.tasks) if i not in self.ended]
        waiting = [self.queues.tasks[i].name for _, i in self.waiting]
        if waiting:
            return (f"the schedule hangs: {', '.join(waiting[:3])} cannot get cores that are held by a SuperKernel "
                    "which waits for another stream; lower the core limits or end the region earlier")
        return f"the schedule hangs: {', '.join(names[:3])} wait for each other"
