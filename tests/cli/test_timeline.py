"""`cannopy timeline` and plan files: written, edited, given back, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import cannopy
from cannopy import Options, api, cli, planning
from cannopy.pipeline_text import DEFAULT, parse
from cannopy.planning import PlanFileError

MODEL = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("up", "down", "side", "head"):
            setattr(self, name, nn.Linear(512, 512, bias=False))

    def forward(self, x):
        main = self.down(torch.tanh(self.up(x)))
        return self.head(main + self.side(torch.relu(x)))

def make(dtype=None):
    torch.manual_seed(0)
    return Branches().to(torch.bfloat16).eval(), "forward", (torch.randn(64, 512, dtype=torch.bfloat16),)
"""
FORCED = f"{DEFAULT}{{streams=force,core_limits=force}}"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "mine.py").write_text(MODEL)
    arguments = ["timeline", f"{folder / 'mine.py'}:make", "--pipeline", FORCED, "--out", str(folder / "out")]
    assert cli.main(arguments) == 0
    return folder


def plan_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "out" / "plan.yaml").read_text())


def compiled(folder: Path, plan: Path | None) -> tuple[cannopy.Compiled, torch.Tensor]:
    space: dict[str, Any] = {}
    exec(compile((folder / "mine.py").read_text(), str(folder / "mine.py"), "exec"), space)
    model, method, args = space["make"]()
    made = cannopy.compile(model, method, args, options=Options(plan=plan, use_cache=False))
    return made, made(*args)


def test_files(drawn: Path) -> None:
    page = (drawn / "out" / "timeline.html").read_text()
    assert "mine.py" in page
    assert "nothing here was measured on a device" in page
    trace = json.loads((drawn / "out" / "trace.json").read_text())
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"main", "side1"} <= lanes
    assert plan_of(drawn)["target"] == "atlas-a3"


def test_a_plan_that_is_given_back_is_the_plan(drawn: Path, tmp_path: Path) -> None:
    plan = str(drawn / "out" / "plan.yaml")
    assert cli.main(["timeline", f"{drawn / 'mine.py'}:make", "--plan", plan, "--out", str(tmp_path)]) == 0
    again = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert again["layers"] == plan_of(drawn)["layers"]


def test_a_planned_graph_computes_the_same(drawn: Path) -> None:
    plain, expected = compiled(drawn, None)
    planned, found = compiled(drawn, drawn / "out" / "plan.yaml")
    assert torch.equal(found, expected)
    assert planned.report.schedule["streams"] == 2
    assert planned.report.schedule["core_limits"]
    assert planned.report.kernels == plain.report.kernels
    assert planned.report.cache["key"] != plain.report.cache["key"]
    assert [run["name"] for run in (planned.timeline or {})["runs"]] == ["serial", "plan.yaml"]


def edited(drawn: Path, folder: Path, old: str, new: str) -> Path:
    text = (drawn / "out" / "plan.yaml").read_text()
    assert old in text
    file = folder / "edited.yaml"
    file.write_text(text.replace(old, new))
    return file


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("target: atlas-a3", "target: atlas-a2", ["is for atlas-a2, and the target is atlas-a3"]),
        ("target:", "targte:", ["did you mean", "target"]),
        ("aten.tanh", "aten.tan", ["aten.tan", "did you mean", "aten.tanh"]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(drawn: Path, tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    file = edited(drawn, tmp_path, old, new)
    with pytest.raises(PlanFileError) as error:
        compiled(drawn, file)
    assert all(word in str(error.value) for word in [str(file), *words]), str(error.value)


MISTAKES: list[tuple[str, str, str]] = [
    ("layers:", "layer:", r"line \d+: plan: unknown key 'layer'; did you mean 'layers'"),
    ("target: atlas-a3", "target:", r"line 1: plan, target: expected a name, found None"),
    ("target: atlas-a3", "target: atlas-a3\ntarget: atlas-a2", r"line 2: 'target' is given twice, first in line 1"),
    ("  kernels:", "  kernel:", r"line \d+: block 1: unknown key 'kernel'; did you mean 'kernels'"),
    ("  kernels:", "  kernels: 5\n  prefetch:", r"line \d+: block 1 .*kernels: expected a list, found 5"),
    ("stream: side1", "steam: side1", r"line \d+: block 1 .*unknown key 'steam'; did you mean 'stream'"),
    ("stream: side1", "stream: [side1]", r"line \d+: block 1 .*stream: expected a name, found \['side1'\]"),
    ("cores: c", "cores: v", r"line \d+: block 1 .*expected cube and vector cores as in c16v32"),
    ("cores: c", "cores: c9", r"core limit: .* is limited to c9\S+; expected 1 to 24[^\n]*\n    \w+: line \d+"),
    ("aten.tanh", "aten.than", r"line \d+: block 1 .*unknown kernel .*'aten.than.*did you mean 'aten.tanh"),
    ("stream: side1", "stream: side1, wait: [aten.tan]", r"line \d+: block 1 .*unknown kernel .*'aten.tan'"),
    ("stream: side1", "stream: side1, wait: [next/aten.tanh.default]", r"line \d+: .*there is nothing next"),
    ("stream: side1", "stream: side1, wait: aten.tanh", r"line \d+: .*wait: expected a list"),
    ("stream: side1", "stream: side1, super_kernel: sk9", r"line \d+: .*unknown SuperKernel region 'sk9'"),
    ("layers: g1", "layers: 0-1", r"line \d+: block 1 .*unknown layer '0'; did you mean 'g1'"),
    ("layers: g1", "layers: g1, g1", r"line \d+: block 1 .*each once"),
    ("streams: force", "streams: never", r"line \d+: .*unknown switch of streams 'never'"),
    ("streams: force", "stream: force", r"line \d+: .*unknown key 'stream'; did you mean 'streams'"),
    ("  features: {", "  kernels: [{layers: g1, kernel: aten.tan, stream: main}]\n  features: {",
     r"line \d+: pins, kernel 1: unknown kernel .*'aten.tan'; did you mean"),
    ("layers:", "layers: [", r"line \d+: no YAML"),
    ("layers:", "\tlayers:", r"line \d+: no YAML"),
]


@pytest.fixture(scope="module")
def graph(drawn: Path) -> Any:
    """The lowered model, to which many plans are given."""
    space: dict[str, Any] = {}
    exec(compile((drawn / "mine.py").read_text(), str(drawn / "mine.py"), "exec"), space)
    model, method, args = space["make"]()
    options = Options(use_cache=False, pipeline=DEFAULT.removesuffix(",schedule"))
    return api.lower(model, method, args, {}, options, {})[0]


@pytest.mark.parametrize(("old", "new", "words"), MISTAKES)
def test_mistakes_are_named_with_their_line(drawn: Path, graph: Any, tmp_path: Path, old: str, new: str,
                                            words: str) -> None:
    text = (drawn / "out" / "plan.yaml").read_text()
    assert old in text
    file = tmp_path / "edited.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(PlanFileError, match=words) as error:
        planning.make(graph, parse(DEFAULT).stages[-1], "atlas-a3", file)
    assert str(file) in str(error.value)


def test_kernels_left_out_twice_out_of_order_and_streams_beyond_the_budget(drawn: Path, graph: Any,
                                                                           tmp_path: Path) -> None:
    lines = (drawn / "out" / "plan.yaml").read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if line.startswith("  - aten.")]
    first, last = lines[rows[0]], lines[rows[-1]]
    spread = {row: f"{lines[row].partition(': {')[0]}: {{stream: s{n}}}" for n, row in enumerate(rows[:5])}
    for changed, words in (
        ([line for line in lines if line != first], "has no 'aten."),
        ([*lines[: rows[-1] + 1], first, *lines[rows[-1] + 1 :]], rf"line {rows[-1] + 2}: .*placed already, in line "
                                                                    rf"{rows[0] + 1}"),
        ([{rows[0]: last, rows[-1]: first}.get(i, line) for i, line in enumerate(lines)],
         rf"is placed before it\n    \w+: line {rows[0] + 1} "),
        ([spread.get(i, line) for i, line in enumerate(lines)], r"a graph has at most 4\n    \w+: line \d+ "),
    ):
        file = tmp_path / "edited.yaml"
        file.write_text("\n".join(changed))
        with pytest.raises(PlanFileError, match=words):
            planning.make(graph, parse(DEFAULT).stages[-1], "atlas-a3", file)


def test_the_times_of_an_edited_plan_are_its_own(drawn: Path, graph: Any, tmp_path: Path) -> None:
    """Not those that the file has from before it was edited."""
    stage, file = parse(DEFAULT).stages[-1], drawn / "out" / "plan.yaml"
    given = planning.make(graph, stage, "atlas-a3", file).plan
    assert f"predicted_us: {given.predicted_us:.3f}\nserial_us: {given.serial_us:.3f}\n" in file.read_text()
    data = plan_of(drawn)
    data["layers"] = [{"layers": one["layers"], "kernels": [k if isinstance(k, str) else next(iter(k))
                                                            for k in one["kernels"]]} for one in data["layers"]]
    edited = tmp_path / "edited.yaml"
    edited.write_text(yaml.safe_dump(data))
    own = planning.make(graph, stage, "atlas-a3", edited).plan
    assert own.predicted_us == own.serial_us == given.serial_us
    assert given.predicted_us is not None
    assert own.predicted_us > given.predicted_us


def test_a_plan_that_could_hang_is_refused(drawn: Path, tmp_path: Path) -> None:
    limits = {str(kernel[k]["cores"]) for layer in plan_of(drawn)["layers"] for kernel in layer["kernels"]
              if isinstance(kernel, dict) for k in kernel if "cores" in kernel[k]}
    file = edited(drawn, tmp_path, f"cores: {min(limits, key=len)}", "cores: c24v48")
    with pytest.raises(PlanFileError, match=r"can run at the same time[^\n]*the die has c24v48"):
        compiled(drawn, file)


def test_a_file_that_is_not_there(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", f"{drawn / 'mine.py'}:make", "--no-cache", "--plan", "nowhere.yaml"]) == 1
    assert "nowhere.yaml: No such file" in capsys.readouterr().err


def test_no_plan_no_picture(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = DEFAULT.removesuffix(",schedule")
    assert cli.main(["timeline", f"{drawn / 'mine.py'}:make", "--pipeline", pipeline]) == 1
    assert "has no stage schedule" in capsys.readouterr().err
