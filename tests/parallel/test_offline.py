"""One die of a layout, compiled without weights and without the other ranks: its collectives, its memory, its plan."""

from __future__ import annotations

import json

import pytest

from cannopy import cli

LAYOUT = "dp=8,ep=8,o_proj_tp=2,dense_tp=4,embed_tp=8,lm_head_tp=8"
DENSE = 1


@pytest.mark.slow
def test_a_die_of_eight(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "deepseek-r1", "--form", "serving", "--offline", "--no-cache", "--rank", "5", "--batch",
                     "2", "--parallel", LAYOUT, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    ge = {name: count for name, count in report["ge_ops"].items() if "Hcom" in name or "Distribute" in name}
    layers = len([r for r in report["layers"] if r["layer"] is not None])
    assert ge == {
        "HcomAllGather": DENSE + 2,  # of ids and before the head
        "HcomReduceScatter": layers + DENSE + 1,
        "HcomAllToAll": layers + 1,
        "MoeDistributeDispatchV2": layers - DENSE, "MoeDistributeCombineV2": layers - DENSE,
    }
    memory = report["memory"]
    assert memory["fits"]
    assert memory["buffsize_mb"] == dict.fromkeys(("embed_tp", "o_proj_tp", "dense_tp", "ep", "lm_head_tp"), 200)
    schedule = report["schedule"]
    assert schedule["lower_bound_us"] <= schedule["predicted_us"] <= schedule["serial_us"]
    assert schedule["streams"] >= 1
