"""`--bisect`: the rewrite after which the result is wrong, wherever it is and however it goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cannopy import Options, bisect
from cannopy.backend.host.activate import activate
from cannopy.cli import main
from cannopy.errors import CannopyError
from cannopy.frontend.capture import capture
from cannopy.fx_passes.graph import aten
from cannopy.fx_passes.program import Program
from tests.extension.models import call_of, make, wrong_rule

MODEL = Path(__file__).with_name("models.py")


@pytest.fixture(scope="module")
def call() -> tuple[Any, str, tuple[Any, ...], dict[str, Any]]:
    activate()
    return call_of(make())


@pytest.fixture(scope="module")
def program(call: tuple[Any, ...]) -> Program:
    return capture(*call)


def search(program: Program, call: tuple[Any, ...], **options: Any) -> tuple[bisect.Bisection, list[str]]:
    said: list[str] = []
    return bisect.Bisector(program, *call, Options(**options)).search(said.append), said


def test_nothing_is_wrong_with_a_correct_model(program: Program, call: tuple[Any, ...]) -> None:
    before = [t.clone() for t in call[2]]
    found, _ = search(program, call)
    assert found.clean
    assert found.probes == 1
    assert found.steps > 10
    assert all(torch.equal(a, b) for a, b in zip(before, call[2], strict=True)), "the arguments were changed"


@pytest.mark.parametrize(("layer", "value"), [(0, "value"), (1, "raises"), (1, "value"), (2, "shape"), (2, "value")])
def test_finds_a_wrong_rule(program: Program, call: tuple[Any, ...], tmp_path: Path, layer: int, value: str) -> None:
    path = wrong_rule(tmp_path, layer, value)
    found, said = search(program, call, rules=path)
    assert found.culprit is not None
    assert (found.culprit.name, found.culprit.layer, found.culprit.module_path) == (
        "wrong_down", layer, f"layers.{layer}.down",
    )
    assert any("models.py:" in line for line in found.culprit.lines)
    assert found.origin.startswith(f"{path}:")
    assert found.probes <= 8
    assert len(said) <= 9
    if value == "raises":
        assert "KeyError: 'y'" in found.problem
        assert f"{path}:18" in found.problem
        assert found.diff == ""
    elif value == "shape":
        assert "pass wrong_down" in found.problem
        assert "+%slice_tensor" in found.diff
    else:
        assert "result 0: median error" in found.problem
        added = [line for line in found.diff.splitlines() if line.startswith("+%")]
        assert any("aten.mul.Tensor(%mul_" in line and "1.25" in line for line in added)
        assert all(f"layers.{layer}" in line for line in added if "linear" in line)


def test_the_first_n_rewrites_are_the_same_whatever_n_is(program: Program, call: tuple[Any, ...]) -> None:
    bisector = bisect.Bisector(program, *call, Options())
    whole = bisector.probe(None).steps
    assert [step.number for step in whole] == list(range(1, len(whole) + 1))
    for n in (0, 1, 7, len(whole)):
        assert bisector.probe(n).steps == whole[:n]


def test_a_wrong_write_shows_although_nothing_reads_it(program: Program, call: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.py"
    path.write_text(
        "import cannopy\n"
        "from cannopy.rules import Any, aten, op\n"
        "@cannopy.rule(equation='x → 2x', after='swiglu',\n"
        "              pattern=op(aten.index_copy.default, Any('cache'), Any(), Any('rows'), Any('x')))\n"
        "def doubled(match, context):\n"
        "    call = context.editor.call\n"
        "    twice = call(aten.add.Tensor, match['x'], match['x'])\n"
        "    wrong = call(aten.index_copy.default, match['cache'], 0, match['rows'], twice)\n"
        "    for user in list(match.anchor.users):\n"
        "        if user.target is aten.copy_.default:\n"
        "            user.replace_input_with(match.anchor, wrong)\n",
        encoding="utf-8",
    )
    found, _ = search(program, call, rules=path)
    assert found.culprit is not None
    assert found.culprit.name == "doubled"
    assert found.problem.startswith("args[1]: ")


def test_a_captured_graph_that_is_wrong_already(call: tuple[Any, ...]) -> None:
    wrong = capture(*call)
    node = next(n for n in wrong.gm.graph.nodes if n.target is aten.silu.default)
    node.target = aten.relu.default
    wrong.gm.recompile()
    found, _ = search(wrong, call)
    assert not found.clean
    assert found.captured
    assert found.culprit is None
    assert "result 0" in found.problem


def test_a_model_without_weights_is_refused(program: Program, call: tuple[Any, ...]) -> None:
    model, method, args, kwargs = call
    meta = type(model)().to("meta")
    with pytest.raises(CannopyError, match="no weights"):
        bisect.Bisector(program, meta, method, args, kwargs, Options())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wrong_rule(tmp_path, 1)
    command = ["dump", f"{MODEL}:make", "--dtype", "bf16", "--bisect"]
    assert main([*command, "--rules", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["culprit"]["name"] == "wrong_down"
    assert found["culprit"]["layer"] == 1
    assert found["clean"] is False
    assert main(command) == 0
    assert "Nothing is wrong" in capsys.readouterr().out
