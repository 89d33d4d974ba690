"""The event loop against cases that can be checked by hand."""

from __future__ import annotations

import random

import pytest

from cannopy.stream_scheduler.simulator import Prefetch, Schedule, ScheduleError, Task, Weight, simulate
from cannopy.stream_scheduler.simulator.sharing import Reader, speeds
from tests.simulator.loads import Fixed, machine

CUBE, VECTOR = (24, 0), (0, 48)


def two_streams(first: str) -> Schedule:
    """S0 = V20 C40 V20, S1 = V30 C20 V20; ``first`` is issued first (torchair's multi-stream guide)."""
    work = {"S0": [(VECTOR, 20), (CUBE, 40), (VECTOR, 20)], "S1": [(VECTOR, 30), (CUBE, 20), (VECTOR, 20)]}
    order = [first, *(s for s in work if s != first)]
    return Schedule(tuple(
        Task(f"{stream}.{i}", Fixed(us, cores), stream)
        for stream in order for i, (cores, us) in enumerate(work[stream])
    ), graphs=0)


@pytest.mark.parametrize(("first", "us"), [("S1", 110), ("S0", 100)])
def test_two_streams_with_exclusive_pools(first: str, us: float) -> None:
    assert simulate(two_streams(first), machine()).us == pytest.approx(us, abs=1e-9)


def test_gap_event_and_graph_launch_by_hand() -> None:
    tasks = (Task("a", Fixed(10)), Task("b", Fixed(10, VECTOR), "side", ("a",)), Task("c", Fixed(5), deps=("b",)))
    trace = simulate(Schedule(tasks, graphs=2), machine(gap_us=1.5, event_us=1, graph_us=700))
    assert trace.spans["a"].start == 1.5
    assert trace.spans["b"].start == 11.5 + 1 + 1.5
    assert trace.spans["c"].start == 24 + 1 + 1.5
    assert (trace.us, trace.host_us, trace.step_us) == (31.5, 1400, 1431.5)
    assert {i.bound for i in trace.intervals if not i.running} == {"launch", "event"}


def test_two_readers_share_the_memory_and_speed_up_when_one_ends() -> None:
    """Each wants 750 of 1000 bytes/us: 500 each until the short one is done, then the long one is alone."""
    half = (12, 24)
    tasks = (Task("long", Fixed(100, half, 75_000)), Task("short", Fixed(40, half, 30_000), "side"))
    trace = simulate(Schedule(tasks, graphs=0), machine())
    assert trace.spans["short"].us == pytest.approx(60)
    assert trace.spans["long"].us == pytest.approx(60 + (75_000 - 60 * 500) / 750)
    rates = [i.hbm_rate for i in trace.intervals if i.task == "long"]
    assert rates == pytest.approx([500, 750])
    assert [i.bound for i in trace.intervals if i.task == "long"] == ["hbm", "hbm"]


def test_who_needs_little_bandwidth_is_not_slowed() -> None:
    half = (12, 24)
    tasks = (Task("small", Fixed(100, half, 20_000)), Task("large", Fixed(50, half, 50_000), "side"))
    trace = simulate(Schedule(tasks, graphs=0), machine())
    assert trace.spans["small"].us == pytest.approx(100)
    assert trace.spans["large"].us == pytest.approx(50_000 / 800)


def test_readers_together_do_not_exceed_the_memory() -> None:
    draw = random.Random(1)
    for _ in range(500):
        readers = []
        for _ in range(draw.randint(2, 4)):
            us, peak = draw.uniform(5, 100), draw.uniform(100, 1500)
            load = us * draw.uniform(0.05, 1)
            readers.append(Reader(us, peak * load, load, peak, draw.choice((500.0, 1400.0))))
        found = speeds(readers, 1500)
        assert all(0 < speed <= 1 for speed in found)
        assert sum(r.bytes / r.us * s for r, s in zip(readers, found, strict=True)) <= 1500 * 1.002


def test_prefetch_shortens_its_kernel_and_the_leftover_competes() -> None:
    """A window of 20 us at 500 bytes/us brings 10,000 of 20,000 bytes."""
    tasks = (Task("norm", Fixed(1)), Task("act", Fixed(20, VECTOR)), Task("mm", Fixed(25, CUBE, 20_000),
                                                                         weights=(Weight("w", 20_000),)))
    plain = simulate(Schedule(tasks, graphs=0), machine())
    whole = Schedule(tasks, (Prefetch("w", 10_000, "norm"),), graphs=0)
    trace = simulate(whole, machine(prefetch_rate=500))
    assert plain.us == pytest.approx(46)
    assert trace.us == pytest.approx(21 + 12.5)
    assert trace.prefetches[0].used == pytest.approx(10_000)
    late = simulate(Schedule(tasks, (Prefetch("w", 20_000, "norm"),), graphs=0), machine(prefetch_rate=500))
    assert late.us > trace.us


def test_prefetched_bytes_are_evicted_by_later_traffic() -> None:
    tasks = (
        Task("norm", Fixed(1)), Task("act", Fixed(20, VECTOR)), Task("other", Fixed(30, CUBE, 15_000)),
        Task("mm", Fixed(25, CUBE, 20_000), weights=(Weight("w", 20_000),)),
    )
    schedule = Schedule(tasks, (Prefetch("w", 10_000, "norm"),), graphs=0)
    trace = simulate(schedule, machine(prefetch_rate=500, l2_bytes=22_000))
    assert trace.evicted_bytes == pytest.approx(3_000)
    assert trace.prefetches[0].used == pytest.approx(4_000), "what is loaded again pushes out as much once more"


def test_super_kernel_saves_starts_for_barriers_and_holds_its_cores() -> None:
    region = [Task(f"k{i}", Fixed(10, (16, 32), start_us=3), super_kernel="r") for i in range(3)]
    side = Task("side", Fixed(10, CUBE), "side", deps=("k0",))
    trace = simulate(Schedule((*region, side), graphs=0), machine(gap_us=1.5, saved_us=2, sync_us=0.5))
    assert trace.spans["k2"].end == 1.5 + 10 + 2 * (1.5 + 0.5 + 8)
    assert trace.spans["side"].start == trace.spans["k2"].end
    assert any(i.bound == "cores" for i in trace.intervals if i.task == "side")


def test_core_limits_let_two_streams_run_together() -> None:
    tasks = (Task("a", Fixed(10), cores=(16, 32)), Task("b", Fixed(10), "side", cores=(8, 16)))
    assert simulate(Schedule(tasks, graphs=0), machine()).us == 10
    over = (Task("a", Fixed(10), cores=(16, 32)), Task("b", Fixed(10), "side", cores=(12, 24)))
    assert simulate(Schedule(over, graphs=0), machine()).us == 20


def test_a_hang_and_a_wrong_schedule_are_errors() -> None:
    held = [Task("k0", Fixed(1), super_kernel="r"), Task("k1", Fixed(1), deps=("s",), super_kernel="r"),
            Task("s", Fixed(1), "side", deps=("k0",))]
    with pytest.raises(ScheduleError, match="hangs: s cannot get cores"):
        simulate(Schedule(tuple(held)), machine())
    with pytest.raises(ScheduleError, match="waits for 'nobody'"):
        simulate(Schedule((Task("a", Fixed(1), deps=("nobody",)),)), machine())
    crossed = (Task("a", Fixed(1), deps=("b",)), Task("b", Fixed(1), "side", deps=("a",)))
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate(Schedule(crossed), machine())
    with pytest.raises(ScheduleError, match="the chip has 24 and 48"):
        simulate(Schedule((Task("a", Fixed(1), cores=(25, 48)),)), machine())


def test_the_same_schedule_gives_the_same_trace() -> None:
    schedule = two_streams("S0")
    assert simulate(schedule, machine()).to_dict() == simulate(schedule, machine()).to_dict()


@pytest.mark.parametrize("long", [1.0, 1e9 / 3, 1e12 / 3, 1e15 / 7])
def test_time_does_not_stand_still_where_the_clock_is_coarse(long: float) -> None:
    tasks = (Task("long", Fixed(long)), *(Task(f"t{i}", Fixed(0.1 * i, bytes=1e3)) for i in range(1, 9)))
    side = (Task("beside", Fixed(long, (0, 0), 1e6), "side"),)
    trace = simulate(Schedule((*tasks, *side), (Prefetch("w", 1e5, "long"),), graphs=0), machine(gap_us=0.3))
    assert set(trace.spans) == {t.name for t in (*tasks, *side)}
    assert trace.us == pytest.approx(long, rel=1e-6, abs=20)
