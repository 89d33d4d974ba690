"""`cannopy estimate`: JSON, tables, sweeps, kernels, errors with the nearest name."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cannopy.cli import main

FLASH = ["estimate", "longcat-flash", "--parallel", "ep=128,dp=128,o_proj_tp=8,dense_tp=8", "--quant", "w8a8"]
LITE = ["estimate", "longcat-flash-lite", "--parallel", "ep=8,dp=8", "--quant", "w8a8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_step_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *FLASH, "--next-n", "1", "--accepted", "0.5", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["lower_bound_us"] < data["step_us"] == data["serial_us"] == data["device_us"] + data["host_us"]
    assert data["tpot_us"] == pytest.approx(data["step_us"] / 1.5)
    assert data["memory"]["fits"]
    assert sum(row["share"] for row in data["kernels"]) == pytest.approx(1)
    assert {"label", "kernel", "count", "us", "bytes", "flops", "bound", "share"} <= set(data["kernels"][0])


def test_the_expert_plan_is_faster_and_the_trace_has_its_streams(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LITE, "--plan", "expert", "--json", "--trace")
    data = json.loads(out)
    assert data["step_us"] < data["serial_us"]
    assert {i["stream"] for i in data["trace"]["intervals"]} == {"main", "moe"}
    assert {i["bound"] for i in data["trace"]["intervals"]} <= {
        "cube", "vector", "hbm", "l2", "link", "launch", "event", "cores"}


def test_tables_name_bound_memory_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *LITE, "--top", "3")
    text = " ".join(out.split())
    assert code == 0
    assert "no schedule of these kernels takes less than" in text
    assert "more," in text
    assert "memory per die: weights 17." in text


def test_a_step_that_does_not_fit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "estimate", "qwen2.5-72b", "--json")
    assert code == 1
    assert not json.loads(out)["memory"]["fits"]


def test_a_sweep_gives_points_and_a_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    code, out, _ = run(capsys, *LITE, "--sweep", "batch=1..6", "--svg", str(picture), "--json")
    points = json.loads(out)["points"]
    assert code == 0
    assert [p["batch"] for p in points] == [1, 2, 4, 6]
    assert [p["step_us"] for p in points] == sorted(p["step_us"] for p in points)
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 4


def test_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("estimate", "--kernel", "int8_matmul", "m=256", "k=7168", "n=4096", "--json")
    _, out, _ = run(capsys, *arguments, "--cores", "24,48")
    whole = json.loads(out)
    assert whole["macs"] == 256 * 7168 * 4096
    assert whole["bytes"] > 7168 * 4096
    assert whole["bound"] in ("cube", "hbm", "launch", "l2")
    _, out, _ = run(capsys, *arguments, "--cores", "12,24")
    assert json.loads(out)["us"] > whole["us"]
    _, out, _ = run(capsys, "estimate", "--kernels")
    assert "int8_matmul" in out


@pytest.mark.parametrize(("arguments", "message"), [
    (["deepsek-v3.2"], "did you mean 'deepseek-v3.2'"),
    (["deepseek-r1", "--parallel", "epp=8"], "did you mean 'ep'"),
    (["deepseek-r1", "--parallel", "ep=7"], "256 experts cannot be divided by ep=7"),
    (["deepseek-r1", "--quant", "w8a8c9"], "did you mean 'w8a8c8'"),
    (["deepseek-r1", "--target", "atlas-a4"], "did you mean 'atlas-a3'"),
    (["kimi-k2", "--next-n", "1"], "Kimi-K2 has no draft layer"),
    (["deepseek-r1", "--sweep", "batsh=1..4"], "did you mean 'batch'"),
    (["--kernel", "int8_matmull", "m=1"], "did you mean 'int8_matmul'"),
    (["--kernel", "int8_matmul", "m=1", "k=2"], "needs n"),
    (["--kernel", "int8_matmul", "m=1", "m=2", "k=2", "n=3"], "size m is given twice"),
    (["--kernel", "int8_matmul", "m=inf", "k=2", "n=3"], "must be positive and finite"),
    (["--kernel", "int8_matmul", "m=1", "k=2", "n=3", "--cores", "48,24"], "24 cube and 48 vector cores"),
    (["--kernel", "int8_matmul", "m=1", "k=2", "n=3", "--cores", "²,2"], "--cores takes cube and vector cores"),
    (["--kernel", "int8_matmul", "m=1", "k=2", "n=3", "--cores", "24"], "--cores 24,48"),
    (["deepseek-r1", "--batch-per-die", "0"], "above 0"),
    (["deepseek-r1", "--batch-per-die", "2.5"], "a whole number of sequences"),
    (["deepseek-r1", "--parallel", "ep=8,ep=16"], "ep is given twice"),
    (["deepseek-r1", "--parallel", "ep=²"], "ep is a number of dies"),
    (["deepseek-r1", "--next-n", "1", "--accepted", "1.5"], "more than the 1 drafts"),
    (["deepseek-r1", "--sweep", "batch=1..²"], "whole numbers"),
    (["deepseek-r1", "--sweep", "batch=1..2", "--from-graph"], "not a graph"),
    (["deepseek-r1", "--svg", "x.svg"], "curve of a --sweep"),
    (["deepseek-r1", "--sweep", "batch=1..2", "--svg", "no/such/x.svg"], "there is no folder"),
    (["qwen3-32b", "--parallel", "moe_tp=2"], "no experts; leave moe_tp out"),
    (["deepseek-r1", "--parallel", "dense_tp=1000"], "width 18432 cannot be divided by 1000"),
    (["qwen2.5-32b", "--parallel", "attn_tp=5"], "8 heads of keys cannot be divided by attn_tp=5"),
    (["qwen3-235b-a22b", "--parallel", "attn_tp=4,lm_head_tp=8"], "leave lm_head_tp out"),
    (["qwen3-235b-a22b", "--parallel", "attn_tp=2,moe_tp=4"], "no part of attn_tp=2"),
    (["deepseek-r1", "--parallel", "attn_tp=2,sp=2"], "leave sp=2 out"),
    (["deepseek-v3.2", "--parallel", "kvp=2"], "V3.2-Exp has an indexer; leave kvp out"),
    (["qwen3-32b", "--parallel", "kvp=2"], "has caches with heads; leave kvp out"),
    (["deepseek-r1", "--parallel", "kvp=2,o_proj_tp=2"], "cuts the output projections already; leave o_proj_tp out"),
    (["deepseek-r1", "--parallel", "kvp=3"], "128 heads cannot be divided by kvp=3"),
    (["deepseek-r1", "--parallel", "kvp=2,dense_tp=4"], "dense_tp=4 is no part of kvp=2"),
    (["qwen3-235b-a22b", "--parallel", "moe_tp=1024"], "experts of width 1536"),
    (["deepseek-v3.2", "--from-graph", "--target", "atlas-a4"], "did you mean 'atlas-a3'"),
    (["deepseek-r1", "--trace"], "--json of one step"),
    ([], "a MODEL or --kernel is missing"),
])
def test_errors_name_what_would_be_right(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, "estimate", *arguments)
    assert code == 1
    assert message in err


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "x"])
def test_numbers_are_finite(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", "deepseek-r1", "--batch-per-die", value])
    assert stopped.value.code == 2
    assert "expected a number" in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    page = (Path(__file__).resolve().parents[2] / "docs" / "estimate.md").read_text(encoding="utf-8")
    example = page[page.index("    $ cannopy estimate") :].split("\n\n", 2)
    command = example[0].replace("\\\n", " ").split()[2:]
    code, out, _ = run(capsys, *command)
    assert code == 0
    shown, printed = ([line.strip() for line in t.splitlines() if line.strip()] for t in (example[1], out))
    assert shown == printed
