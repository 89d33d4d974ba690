"""Options: what is refused, and what their text covers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cannopy import CannopyError, CompileReport, Options
from cannopy.fx_passes.parallel import Parallel, ParallelError

VARIANTS = {
    "phase": "decode",
    "target": "atlas-a2",
    "block_size": 64,
    "fusions": {"rms_norm": False},
    "pipeline": "normalise,lift,fuse,legalise",
    "regions": False,
    "parallel": "ep=4,dp=4",
}
NOT_IN_TEXT = {"cache_dir": Path("/x"), "use_cache": False, "dump_dir": Path("/x"), "verify": False,
               "rules": (Path("/x"),), "plan": Path("/x"), "cache_timeout": 5.0, "ranks": (0, 1),
               "group_timeout": 5.0, "keep_weights": True}
WITH_PARALLEL = {"rank": 3}


def test_every_option_is_covered_here():
    assert {f.name for f in dataclasses.fields(Options)} == {*VARIANTS, *NOT_IN_TEXT, *WITH_PARALLEL}


@pytest.mark.parametrize("name", VARIANTS)
def test_text_has_each_option_that_decides_the_graph(name):
    assert Options(**{name: VARIANTS[name]}).text() != Options().text()


@pytest.mark.parametrize("name", NOT_IN_TEXT)
def test_text_has_nothing_else(name):
    assert Options(**{name: NOT_IN_TEXT[name]}).text() == Options().text()


def test_text_does_not_depend_on_order_or_defaults():
    one = Options(fusions={"b": False, "a": "require", "c": True})
    assert one.text() == Options(fusions={"a": "require", "b": False}).text()
    assert one.text().splitlines()[-2:] == ["fuse.a=require", "fuse.b=off"]


def test_round_trip():
    options = Options(phase="prefill", fusions={"a": "require"}, cache_dir=Path("/tmp/c"))
    assert Options.from_dict(json.loads(json.dumps(options.to_dict()))) == options


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"targt": "atlas-a3"}, "did you mean 'target'"),
        ({"target": "atlas-a33"}, "did you mean 'atlas-a3'"),
        ({"phase": "decoding"}, "did you mean 'decode'"),
        ({"fusions": {"a": "requires"}}, "fusion a: expected True, False or 'require'"),
        ({"block_size": 2048}, "from 16 to 1024, found 2048"),
        ({"block_size": 24}, "multiple of 16"),
        ({"block_size": 0}, "found 0"),
        ({"block_size": True}, "found True"),
        ({"cache_timeout": -1}, "cache_timeout: expected seconds from 0, found -1"),
        ({"group_timeout": 0}, "group_timeout: expected seconds above 0, found 0"),
        ({"keep_weights": True, "use_cache": False}, "keep_weights: there is no cache to keep them in"),
        ({"rank": 1}, "rank: 1 is given without parallel"),
        ({"parallel": 4}, "expected sizes such as ep=4,dp=4, found 4"),
        ({"parallel": "absent.yaml"}, "cannot read the sizes of the groups from absent.yaml"),
    ],
)
def test_refusals(values, words):
    with pytest.raises(CannopyError, match=words):
        Options.from_dict(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parallel": "eq=4"}, "did you mean 'ep'"),
        ({"parallel": {"o_proj": 4}}, "did you mean 'o_proj_tp'"),
        ({"parallel": "ep=4,dp=6"}, "6 dies cannot be divided into groups of ep=4"),
        ({"parallel": "ep=4", "rank": 4}, "ranks 0 to 3, found rank 4"),
    ],
)
def test_layouts_that_cannot_be(values, words):
    with pytest.raises(ParallelError, match=words):
        Options(**values)


def test_a_layout_may_be_sizes_a_text_or_a_file(tmp_path):
    (tmp_path / "sizes.yaml").write_text("ep: 4\ndense_tp: 2\n")
    wanted = Parallel(ep=4, dense_tp=2)
    given = [wanted, "ep=4,dense_tp=2", {"ep": 4, "dense_tp": 2}, tmp_path / "sizes.yaml", str(tmp_path / "sizes.yaml")]
    assert [Options(parallel=one).parallel for one in given] == [wanted] * 5
    options = Options(parallel=wanted, rank=2)
    assert Options.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().phase = "decode"
    with pytest.raises(TypeError):
        Options().fusions["a"] = True


def test_unknown_fusion_names_the_nearest():
    with pytest.raises(CannopyError, match="did you mean 'mla_prolog'"):
        Options(fusions={"mla_prologue": False}).check_fusions(["mla_prolog", "rms_norm"])


REPORT_KEYS = "fusions misses nodes kernels ge_ops cache_copies schedule cache timings device versions"
SCHEDULE_KEYS = "streams core_limits prefetches super_kernels predicted_us lower_bound_us serial_us"


def test_report_has_the_documented_keys():
    data = CompileReport().to_dict()
    assert set(REPORT_KEYS.split()) <= set(data)
    assert list(data["schedule"]) == SCHEDULE_KEYS.split()
    assert json.loads(json.dumps(data)) == data


def test_report_round_trip():
    report = CompileReport(fusions={"a": 2}, cache_copies=0, misses=[{"rule": "a", "reason": "b"}])
    assert CompileReport.from_dict(report.to_dict()) == report
    with pytest.raises(CannopyError, match="did you mean 'fusions'"):
        CompileReport.from_dict({"fusion": {}})
