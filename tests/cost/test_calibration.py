"""The constants are what the fit gives, and the fit predicts points that it has not seen."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks import accuracy, calibrate
from benchmarks.fit import fit_all, leave_one_out, load_groups, pairs
from benchmarks.fit_networks import fit_networks
from benchmarks.residuals import Residual, plot
from cannopy.stream_scheduler.calibration import FITTED, HELD_OUT, load_points, sources, table
from cannopy.stream_scheduler.constants import Constants, load_constants
from cannopy.stream_scheduler.constants.model import merge, parse

GROUPS = load_groups()
ROOT = Path(__file__).resolve().parents[2]


def stored() -> Constants:
    return load_constants()


def test_a_fit_gives_the_stored_constants() -> None:
    """From the start values of groups.yaml; what networks decide is a test of its own, below."""
    fitted = fit_all(GROUPS, calibrate.published())
    on_networks = {c.name for g in GROUPS if g.on_networks for c in g.constants}
    assert set(calibrate.differences(fitted, stored().table)) <= on_networks


@pytest.mark.slow
def test_a_fit_on_networks_gives_the_stored_constants() -> None:
    (group,) = [g for g in GROUPS if g.on_networks]
    fitted = fit_networks(group, stored())
    for constant in group.constants:
        assert fitted[constant.name] == pytest.approx(stored()[constant.name], rel=0.02)


def test_every_constant_is_fitted_or_says_where_it_is_published() -> None:
    searched = {c.name for g in GROUPS for c in g.constants}
    for name in stored().names():
        entry = stored().entry(name)
        assert entry.source
        if not name.startswith("simulator."):
            assert bool(entry.fitted_on) == (name in searched), name


@pytest.fixture(scope="module")
def left_out() -> dict[tuple[str, str], float]:
    """(file, point) to the absolute error of its prediction by constants fitted without it."""
    return {
        (p.file, p.name): abs(us / p.us - 1)
        for g in GROUPS
        if not g.on_networks
        for p, us in leave_one_out(g, stored(), accuracy.GOALS)
    }


@pytest.mark.parametrize(("file", "limit"), accuracy.GOALS.items())
def test_mean_error_of_points_left_out(left_out: dict[tuple[str, str], float], file: str, limit: float) -> None:
    errors = [error for (where, _), error in left_out.items() if where == file]
    assert len(errors) == len(load_points(file)) == len(table(file))
    assert sum(errors) / len(errors) <= limit


def test_points_in_no_fit_are_predicted_as_well() -> None:
    used = {(p.kernel, tuple(p.sizes.items())) for g in GROUPS if not g.on_networks for p in g.points}
    held = load_points("held_out")
    assert len(held) >= 40
    assert not [p.name for p in held if (p.kernel, tuple(p.sizes.items())) in used]
    errors = sorted(abs(p.estimate(stored()).us / p.us - 1) for p in held)
    assert errors[len(errors) // 2] <= 0.12


CORE_SPLIT = pairs(load_points("core_split"))


@pytest.mark.parametrize(("few", "many"), CORE_SPLIT, ids=[few.name for few, _ in CORE_SPLIT])
def test_half_the_cores(few, many) -> None:
    ratio = few.estimate(stored()).us / many.estimate(stored()).us
    assert ratio == pytest.approx(few.us / many.us, rel=accuracy.RATIO_GOAL)
    if few.work.weight_bytes:
        assert few.cold().estimate(stored()).us > 1.2 * few.estimate(stored()).us


def test_there_are_six_pairs() -> None:
    assert len(CORE_SPLIT) == 6


@pytest.mark.parametrize("file", [*FITTED, *HELD_OUT])
def test_points_have_sources(file: str) -> None:
    for point in load_points(file):
        assert sources()[point.source]["trust"] in "ABCD"
        assert point.us > 0


def test_page_shows_every_point_with_its_present_prediction() -> None:
    """Left-out errors take a minute and are not repeated here."""
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for file in (*FITTED, *HELD_OUT):
        for point in load_points(file):
            cells = rf"^\| {re.escape(point.name)} \| `{point.kernel}` \| (\S+) \| (\S+) \|"
            row = re.search(cells, text, re.MULTILINE)
            assert row, f"{point.name} is not on the page: python benchmarks/accuracy.py"
            assert float(row[1]) == point.us
            assert float(row[2]) == pytest.approx(point.estimate(stored()).us, rel=0.01, abs=0.06)


def test_written_constants_read_back() -> None:
    text = calibrate.text(stored(), GROUPS)
    again = parse(text, "kernels.yaml")
    assert set(again) == {c.name for g in GROUPS for c in g.constants}
    assert all(math.isclose(again[n].value, stored()[n], rel_tol=1e-3) for n in again)
    with pytest.raises(ValueError, match="defined twice: "):
        merge([again, again])
    with pytest.raises(ValueError, match=r"file: section\.b: expected fitted_on, source, unit, value, found 3"):
        parse("section: {b: 3}", "file")


def test_a_plot_marks_each_point_and_cuts_far_ones() -> None:
    svg = plot("t", {"a": [Residual(1.0, 0.0, "x"), Residual(90.0, 5.0, "<y>")]}, 0.12)
    assert svg.count("<title>") == 2
    assert "&lt;y&gt;" in svg
    assert "inf" not in svg
