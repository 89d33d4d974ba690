"""The command line without a compilation: help, messages, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from cannopy import cli

ROOT = Path(__file__).parents[2]
VERBS = ["run", "compile", "explain", "dump", "rules", "estimate", "timeline", "cache", "doctor", "host"]


def _exit_code(arguments: list[str]) -> int:
    """What the process would exit with."""
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def test_help_lists_every_verb_and_no_other(capsys):
    assert _exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("    ") and not line.startswith("     ")]
    assert listed == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_verb_help_has_examples_and_json(capsys, verb):
    assert _exit_code([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"cannopy {verb}" in text.split("examples:")[1]
    assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["rnu"], "'run'"),
        (["compiel", "deepseek-v3.2"], "'compile'"),
        (["run", "deepseek-v3.2", "--sise", "tiny"], "'--size'"),
        (["run", "deepseek-v3.2", "--target", "atlas-a4"], "'atlas-a"),
        (["run", "deepseek-v3.2", "--phase", "prefil"], "'prefill'"),
        (["compile", "deepseek-v3.2", "--dtype", "bf-16"], "'bf16'"),
        (["host", "instal"], "install"),
    ],
)
def test_a_wrong_word_is_refused_with_the_nearest_valid_one(capsys, arguments, nearest):
    assert _exit_code(arguments) == cli.EXIT_CANNOT_START
    text = capsys.readouterr()
    assert nearest in text.err
    assert "--help" in text.err
    assert text.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "deepseek-v3"], ["unknown model 'deepseek-v3'", "deepseek-v3.2"]),
        (["run", "deepseek-v3.2", "--size", "tyni"], ["no size 'tyni'", "'tiny'"]),
        (["compile", "nowhere.py:make"], ["nowhere.py does not exist"]),
        (["compile", "deepseek-v3.2", "--block-size", "100"], ["block_size", "multiple of 16", "100"]),
        (["run", "deepseek-v3.2", "--prompt-tokens", "300"], ["300 tokens", "256", "--max-cache-len"]),
        (["run", "deepseek-v3.2", "--size", "full"], ["has no weights", "cannopy compile"]),
        (["explain", "deepseek-v3.2", "--rule", "mla_prologue"], ["unknown rule", "'mla_prolog'"]),
        (["compile", "nowhere.py:make", "--fusion", "mla_prologue=off"], ["unknown fusion", "'mla_prolog'"]),
        (["run", "nowhere.py:make", "--rules", "none.py"], ["none.py does not exist"]),
        (["run", "nowhere.py:make", "--plan", "none.yaml"], ["none.yaml: No such file", "cannopy timeline"]),
        (["explain", "nowhere.py:make", "--parallel", "auto"], ["only run, compile and estimate", "--dies"]),
        (["explain", "nowhere.py"], ["nowhere.py:FUNCTION"]),
        (["cache", "show", "nothing"], ["0 entries", "cannopy cache ls"]),
    ],
)
def test_a_request_that_cannot_be_met_is_one_message(capsys, tmp_path, arguments, words):
    more = ["--cache-dir", str(tmp_path)] if arguments[0] in ("compile", "cache") else []
    assert _exit_code(arguments + more) == cli.EXIT_FAILED
    text = capsys.readouterr().err
    assert "Traceback" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("value", ["mla_prolog", "mla_prolog=maybe", "=on"])
def test_fusion_switch_is_checked(capsys, value):
    assert _exit_code(["compile", "deepseek-v3.2", "--fusion", value]) == cli.EXIT_CANNOT_START
    assert "RULE=require" in capsys.readouterr().err


def test_json_problem(capsys):
    assert _exit_code(["run", "deepseek-v3", "--json"]) == cli.EXIT_FAILED
    text = capsys.readouterr()
    assert json.loads(text.out)["error"] == "ModelSourceError"
    assert text.err == ""


def test_an_error_that_is_not_ours_keeps_its_trace(tmp_path):
    """A bug in the user's factory is theirs to see."""
    file = tmp_path / "broken.py"
    file.write_text("def make():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        cli.main(["compile", f"{file}:make"])


def test_cache_of_an_empty_folder(capsys, tmp_path: Path):
    assert _exit_code(["cache", "ls", "--cache-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "bytes": 0, "entries": []}
    assert _exit_code(["cache", "prune", "--all", "--cache-dir", str(tmp_path)]) == 0
    assert "removed 0" in capsys.readouterr().out


def test_what_a_model_prints_stays_out_of_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output of `--json` is one object even when the user's factory prints."""
    file = tmp_path / "loud.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    print('factory')\n"
        "    return torch.nn.Linear(16, 16), 'forward', (torch.ones(1, 16),)\n"
    )
    assert cli.main(["explain", f"{file}:make", "--json"]) == 0
    text = capsys.readouterr()
    data = json.loads(text.out)
    assert (data["hits"], data["misses"], data["off"], data["unmet"]) == ([], [], [], [])
    assert data["absent"]["swiglu"]
    assert "factory" in text.err


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_factory_in_the_readme_fuses_as_it_says(page, tmp_path, capsys):
    text = (ROOT / page).read_text(encoding="utf-8")
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def make(" in b]
    (tmp_path / "my_model.py").write_text(block, encoding="utf-8")
    assert cli.main(["explain", f"{tmp_path / 'my_model.py'}:make", "--phase", "decode", "--json"]) == 0
    kernels = [k for hit in json.loads(capsys.readouterr().out)["hits"] for k in hit["kernels"]]
    assert {"npu_rms_norm", "npu_swiglu"} <= set(kernels)
    assert all(f"`{kernel}`" in text for kernel in ("npu_rms_norm", "npu_swiglu"))


def test_set_up_tells_each_step_that_downloads():
    made = subprocess.run(["make", "-n", "-W", "pyproject.toml", "setup"], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.splitlines()
    installs = [i for i, line in enumerate(made) if " -m pip " in line]
    assert len(installs) == 3
    for i in installs:
        assert re.match(r'echo "  \d/5 ', made[i - 1]), made[i - 1]
    assert sum("downloading" in made[i - 1] for i in installs) == 2
