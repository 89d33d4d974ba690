"""Descriptions of chips: figures that derive from each other, names, sources."""

from __future__ import annotations

import pytest

from cannopy.options import TARGETS
from cannopy.stream_scheduler.hardware import UnknownHardwareError, hardware_names, load_hardware

# BF16 peak in TFLOPS and core-side memory rate in TB/s, as published beside the same ini files.
PEAKS = {
    "Ascend910B1": (363.7, 1.42),
    "Ascend910B2": (353.9, 1.38),
    "Ascend910B3": (294.9, 1.15),
    "Ascend910B4": (245.8, 0.96),
    "Ascend910_9391": (363.7, 1.42),
    "Ascend910_9381": (353.9, 1.38),
    "Ascend910_9372": (294.9, 1.15),
    "Ascend910_9362": (245.8, 0.96),
    "Ascend950DT_9582": (432.5, 4.22),
    "Ascend950DT_9591": (530.8, 5.18),
    "Ascend950PR_9589": (432.5, 1.64),
    "Ascend950PR_957d": (378.5, 1.06),
    "Ascend350_355e": (216.3, 0.82),
}


@pytest.mark.parametrize("soc", PEAKS)
def test_peaks_follow_from_cores_and_clock(soc: str) -> None:
    chip, (peak, memory) = load_hardware(soc), PEAKS[soc]
    assert 2 * chip.cube_rate("bf16") / 1e12 == pytest.approx(peak, abs=0.06)
    assert chip.core_hbm_bandwidth() / 1e12 == pytest.approx(memory, abs=0.006)
    assert chip.cube_rate("int8") == 2 * chip.cube_rate("bf16")


def test_targets_of_options_are_names_here() -> None:
    for target in TARGETS:
        assert load_hardware(target).family == target


@pytest.mark.parametrize("name", hardware_names())
def test_every_chip_is_complete(name: str) -> None:
    chip = load_hardware(name)
    assert chip.vector_cores == 2 * chip.cube_cores
    assert 0 < chip.hbm() <= chip.hbm_bandwidth
    assert chip.l2_read_bandwidth() > chip.hbm()
    assert chip.links["fabric"].bandwidth > 1e11
    assert 0 < chip.launch_gap_us < chip.graph_launch_us
    assert all(f.source and f.trust in "ABCDE" for f in chip.figures.values())


def test_core_side_rates_grow_with_cores() -> None:
    chip = load_hardware("atlas-a3")
    assert chip.hbm(12, 0) == pytest.approx(chip.core_hbm_bandwidth() / 2)
    assert chip.core_hbm_bandwidth(0, 16) == chip.core_hbm_bandwidth(8, 0)


def test_names_are_found_in_any_spelling() -> None:
    assert load_hardware("910_9391") is load_hardware("ASCEND910_9391")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownHardwareError, match="did you mean 'Ascend910_9391'"):
        load_hardware("Ascend910_9399x1")


def test_a_dtype_that_the_cube_lacks() -> None:
    with pytest.raises(ValueError, match=r"does not multiply fp8; it has .*int8"):
        load_hardware("atlas-a3").cube_rate("fp8")
    assert load_hardware("atlas-950").cube_rate("fp8") == load_hardware("atlas-950").cube_rate("int8")
