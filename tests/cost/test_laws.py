"""What must hold of every time law, whatever its constants."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannopy.stream_scheduler.constants import UnknownConstantError, load_constants
from cannopy.stream_scheduler.cost import BOUNDS, Share, estimate, kernel, kernel_names, sensitivity
from cannopy.stream_scheduler.cost.chip import Parts
from cannopy.stream_scheduler.cost.laws import LAWS
from cannopy.stream_scheduler.hardware import hardware_names, load_hardware
from tests.cost.test_kernels import some_sizes

A3 = load_hardware("atlas-a3")
SLACK = 1 + 1e-9


def us(name: str, scale: float = 1.0, **share: float) -> float:
    sizes = {n: v * scale if n in ("tokens", "rows", "m", "batch") else v for n, v in some_sizes(kernel(name)).items()}
    return estimate(name, sizes, hardware=A3, share=Share(**share)).us  # type: ignore[arg-type]


@pytest.mark.parametrize("name", kernel_names())
@settings(max_examples=15, deadline=None)
@given(cores=st.integers(1, 23), scale=st.sampled_from([0.125, 1, 16, 512]), resident=st.sampled_from([0.0, 0.5, 1.0]))
def test_more_cores_never_take_longer(name: str, cores: int, scale: float, resident: float) -> None:
    few = us(name, scale, cube_cores=cores, vector_cores=2 * cores, l2_weights=resident)
    more = us(name, scale, cube_cores=cores + 1, vector_cores=2 * cores + 2, l2_weights=resident)
    assert more <= few * SLACK


@pytest.mark.parametrize("name", kernel_names())
@settings(max_examples=10, deadline=None)
@given(hbm=st.floats(0.05, 0.95), scale=st.sampled_from([0.125, 1, 64]))
def test_more_bandwidth_and_more_in_l2_never_take_longer(name: str, hbm: float, scale: float) -> None:
    assert us(name, scale, hbm=1.0) <= us(name, scale, hbm=hbm) * SLACK
    assert us(name, scale, hbm=hbm, l2_weights=1.0) <= us(name, scale, hbm=hbm, l2_weights=0.3) * SLACK


@pytest.mark.parametrize("name", kernel_names())
def test_more_work_never_takes_less(name: str) -> None:
    times = [us(name, scale) for scale in (0.125, 1, 4, 32, 256, 4096)]
    assert all(a <= b * SLACK for a, b in pairwise(times))


@pytest.mark.parametrize("name", kernel_names())
def test_no_kernel_beats_the_hardware(name: str) -> None:
    """Compute at peak and bytes from HBM at the nominal rate (large sizes, so that L2 holds little) are a floor."""
    sizes = {n: v * 512 if n in ("tokens", "rows", "m", "batch", "elements") else v
             for n, v in some_sizes(kernel(name)).items()}
    found = estimate(name, sizes, hardware=A3)
    assert found.us >= 1e6 * found.work.macs / A3.cube_rate(found.work.kernel.mac_dtype)
    if not name.startswith(("all_", "reduce_scatter")):
        assert found.us * 1e-6 >= found.work.bytes / A3.l2_read_bandwidth()
    assert found.us * 1e-6 >= found.work.link_bytes / (1.1 * SLACK * A3.links["fabric"].bandwidth)


@pytest.mark.parametrize("name", kernel_names())
def test_an_estimate_explains_itself(name: str) -> None:
    found = estimate(name, some_sizes(kernel(name)), hardware=A3, share=Share(8, 16))
    assert set(found.parts) == set(BOUNDS)
    assert found.parts[found.bound] == max(found.parts.values())
    assert max(found.parts.values()) <= found.us * SLACK
    assert found.us <= sum(found.parts.values()) * SLACK
    assert found.cube_cores in (0, 8)
    assert found.vector_cores in (0, 16)
    assert found.to_dict()["bytes"] == found.work.bytes


def test_every_law_is_used_and_every_kernel_has_one() -> None:
    assert {kernel(n).law for n in kernel_names()} == set(LAWS)


@pytest.mark.parametrize("target", hardware_names())
def test_every_chip_can_be_asked(target: str) -> None:
    chip = load_hardware(target)
    for name in kernel_names():
        assert 0 < estimate(name, some_sizes(kernel(name)), hardware=chip).us < 1e5


def test_a_slower_chip_takes_longer() -> None:
    sizes = {"m": 16.0, "k": 7168.0, "n": 4096.0}
    times = [estimate("int8_matmul", sizes, hardware=load_hardware(n)).us for n in ("atlas-950", "atlas-a3", "910B4")]
    assert times == sorted(times)


def test_weights_in_l2_leave_hbm_alone() -> None:
    sizes = {"m": 8.0, "k": 7168.0, "n": 4096.0}
    cold = estimate("int8_matmul", sizes, hardware=A3)
    warm = estimate("int8_matmul", sizes, hardware=A3, share=Share(l2_weights=1.0))
    assert cold.hbm_bytes - warm.hbm_bytes == 7168 * 4096
    assert cold.bound == "hbm"
    assert warm.parts["l2"] > 0


def test_row_kernels_have_a_step_between_eight_and_thirty_rows() -> None:
    def of(rows: float) -> float:
        return estimate("dynamic_quant", {"rows": rows, "width": 7168}, hardware=A3).us

    assert of(8) < 1.4 * of(1)
    assert of(32) > 1.8 * of(8)


def test_a_collective_jumps_where_hccl_changes_its_protocol() -> None:
    before = estimate("all_gather", {"ranks": 8, "bytes_per_rank": 520_000}, hardware=A3).us
    after = estimate("all_gather", {"ranks": 8, "bytes_per_rank": 530_000}, hardware=A3).us
    assert after > 3 * before


@pytest.mark.parametrize(("overlap", "expected"), [(1.0, 1 + 4 + 10 + 2), (0.0, 1 + 10 + 2), (0.5, 1 + 10 + 2 + 2)])
def test_memory_hides_compute_by_overlap(overlap: float, expected: float) -> None:
    assert Parts(launch=1, cube=4, hbm=10, link=2, overlap=overlap).us == expected


def test_shares_are_checked() -> None:
    for wrong in ({"hbm": 0.0}, {"hbm": 1.5}, {"l2_weights": -0.1}, {"cube_cores": 0}):
        with pytest.raises(ValueError, match="expected"):
            Share(**wrong)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Share().hbm = 0.5  # type: ignore[misc]


def test_sensitivity_moves_one_constant_at_a_time() -> None:
    constants = load_constants()
    sizes = {"m": 8.0, "k": 7168.0, "n": 4096.0}
    found = sensitivity(lambda c: estimate("int8_matmul", sizes, hardware=A3, constants=c).us, constants)
    by_name = {s.name: s for s in found}
    assert set(by_name) == set(constants.names())
    fixed = by_name["matmul_int8.fixed"]
    assert fixed.high - fixed.base == pytest.approx(0.3 * constants["matmul_int8.fixed"])
    assert fixed.base - fixed.low == pytest.approx(0.3 * constants["matmul_int8.fixed"])
    assert by_name["exchange.fixed"].spread == 0
    assert [s.spread for s in found] == sorted((s.spread for s in found), reverse=True)


def test_an_unknown_constant_gets_the_nearest() -> None:
    with pytest.raises(UnknownConstantError, match=r"did you mean 'matmul_int8\.fixed'"):
        load_constants().scaled("matmul_int8.fixd", 2.0)
