"""Published steps and effects, with one set of constants."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import effects, networks
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.model import load_model
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.setting import Parallel, Placement, Quantisation
from cannopy.stream_scheduler.network.step import build
from cannopy.stream_scheduler.simulator import Machine, simulate

A3 = load_hardware("atlas-a3")
CONSTANTS = load_constants()


@pytest.fixture(scope="module")
def rows() -> list[networks.Row]:
    return networks.rows(CONSTANTS)


def test_decode_steps_are_within_15_percent(rows: list[networks.Row]) -> None:
    assert len(rows) == 7
    assert not [row for row in rows if abs(row.error) > 0.15]


def test_the_median_error_of_all_steps_is_within_12_percent(rows: list[networks.Row]) -> None:
    assert statistics.median(abs(row.error) for row in [*rows, *networks.wide(CONSTANTS)]) <= 0.12


def test_a_second_stream_with_core_limits_gains_what_was_measured() -> None:
    serial = networks.LITE_SERIAL.estimate(A3, CONSTANTS).trace.us
    streams = networks.LITE_STREAMS.estimate(A3, CONSTANTS).trace.us
    assert 0.82 <= streams / serial <= 0.90


def test_prefetch_has_its_optimum_between_60_and_110_megabytes() -> None:
    sweep = effects.prefetch_sweep(CONSTANTS, load_hardware("atlas-a2"))
    best = max(sweep, key=lambda megabytes: sweep[megabytes])
    assert 60 <= best <= 110
    assert sweep[10] < sweep[40] < sweep[best]
    assert sweep[120] < sweep[best]
    assert 0.01 < sweep[best] - 1 < 0.04, "2.1 % were measured"


def test_the_super_kernel_sample_saves_5_to_6_percent() -> None:
    machine = Machine.of(A3, CONSTANTS)
    assert effects.super_kernel_sample(machine, fused=False) == pytest.approx(407.54)
    saved = 1 - effects.super_kernel_sample(machine, fused=True) / 407.54
    assert 0.05 <= saved <= 0.06


def test_61_layers_simulate_alike_twice() -> None:
    case = networks.V32_4
    schedule = build(load_model(case.model), case.load, Parallel.parse(case.parallel), Quantisation.parse(case.quant),
                     Placement(side_stream=True), Pricing(A3, CONSTANTS))
    machine = Machine.of(A3, CONSTANTS)
    assert len(schedule.tasks) > 2000
    assert simulate(schedule, machine).us == simulate(schedule, machine).us


def test_no_prediction_beats_its_bound() -> None:
    for case in (networks.LONGCAT_4, networks.LITE_SERIAL, networks.LITE_STREAMS):
        step = case.estimate(A3, CONSTANTS)
        assert step.bounds.us <= step.us, case
        assert step.bounds.critical_path_us > 0
