"""Rules of one's own in a compilation: switches, report, cache key, and what happens when they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cannopy
from cannopy import Options, api, pipeline
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.fx_passes import dump
from cannopy.fx_passes.manager import PassError
from tests.extension.models import call_of, make, wrong_rule

TANH = """\
import torch

import cannopy
from cannopy.rules import Any, Refusal, aten, op

FACTOR = 1.0


def check(match, context):
    return None if match["x"].meta["val"].dtype == torch.bfloat16 else Refusal("this rule wants bf16", match["x"])


@cannopy.rule(equation="mean(x, 0) → mean(1 · x, 0)", pattern=op(aten.mean.dim, Any("x"), Any("dims")), check=check)
def mean_again(match, context):
    call = context.editor.call
    context.editor.replace(match.anchor, call(aten.mean.dim, match["x"], match["dims"]))
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "my_rules.py"
    path.write_text(TANH, encoding="utf-8")
    return path


def compiled(tmp_path: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model, method, args, kwargs = call_of(make(dtype))
    return cannopy.compile(model, method, args, kwargs, Options(cache_dir=tmp_path / "cache", **options))


def lowered(dtype: torch.dtype = torch.bfloat16, **options: Any) -> pipeline.Compilation:
    activate()
    return api.lower(*call_of(make(dtype)), Options(**options), {})[1]


def test_switches(rules: Path) -> None:
    found = lowered(rules=rules)
    assert found.log.counts()["mean_again"] == 1
    assert found.pipeline == str(Options(rules=rules).full_pipeline)
    off = lowered(rules=rules, fusions={"mean_again": False})
    assert "mean_again" not in off.log.counts()
    assert off.pipeline == ("normalise,lift,fuse{mean_again=off},parallel,"
                            "legalise,weight-layout,counters,merge-slices,schedule")
    missed = lowered(torch.float32, rules=rules).log.misses
    assert [m.reason for m in missed if m.rule == "mean_again"] == ["this rule wants bf16"]
    with pytest.raises(pipeline.FusionRequiredError, match="this rule wants bf16"):
        lowered(torch.float32, rules=rules, fusions={"mean_again": "require"})


def test_a_changed_file_is_a_miss_that_names_it(tmp_path: Path, rules: Path) -> None:
    first = compiled(tmp_path, rules=rules).report
    assert first.cache["status"] == "miss"
    assert first.fusions["mean_again"] == 1
    assert [hit["node"] for hit in first.hits if hit["rule"] == "mean_again"]
    assert compiled(tmp_path, rules=rules).report.cache["status"] == "hit"
    rules.write_text(TANH.replace("FACTOR = 1.0", "FACTOR = 2.0"), encoding="utf-8")
    found = compiled(tmp_path, rules=rules).report.cache
    assert found["status"] == "miss"
    assert "rule file my_rules.py" in found["reason"]


def test_the_key_covers_what_a_rule_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that the file imports counts; the file's own digest stays."""
    import sys

    helper = tmp_path / "rule_helper_of_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "my_rules.py"
    path.write_text(TANH.replace("FACTOR = 1.0", "from rule_helper_of_test import use").replace(
        "    call = context", "    use()\n    call = context"), encoding="utf-8")
    texts: list[list[str]] = []
    for value in ("1", "2"):
        helper.write_text(f"def use():\n    return {value}\n", encoding="utf-8")
        sys.modules.pop("rule_helper_of_test", None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        texts.append(pipeline.plan(Options(rules=path)).text().splitlines())
    assert [a.partition("=")[0] for a, b in zip(*texts, strict=True) if a != b] == ["code of rule mean_again"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("raises", r"wrong_rules.py:18 \(context.editor.replace.*KeyError: 'y'"),
        ("shape", r"pass wrong_down: metadata.*\n  the rule wrong_down is at .*wrong_rules.py:10"),
    ],
)
def test_a_wrong_rule_is_named_and_rolled_back(tmp_path: Path, value: str, words: str) -> None:
    activate()
    call = call_of(make())
    program = capture(*call)
    options = Options(rules=wrong_rule(tmp_path, 1, value))
    plan = pipeline.plan(options)
    names = [step.name for step in pipeline.passes(plan, pipeline.Log())]
    with pytest.raises(PassError, match=words):
        pipeline.run(program, options, plan)
    at = names.index("wrong_down")
    twin = capture(*call)
    done: list[str] = []

    def gate(name: str, match: object) -> bool:
        done.append(name)
        return name != "wrong_down" and "swiglu" not in name and (match is None or name.startswith("lift"))

    for step in pipeline.passes(plan, pipeline.Log(), gate)[:at]:
        step.run(twin)
    assert dump.text(program) == dump.text(twin)


def test_a_raising_rule_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"wrong_rules\.py"):
        compiled(tmp_path, rules=wrong_rule(tmp_path, 0, "raises"))
    assert not list((tmp_path / "cache").rglob("manifest*"))


def test_unknown_names_stop_before_anything_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("captured")

    monkeypatch.setattr("cannopy.api.lower", never)
    refusals: list[Callable[[], Any]] = [
        lambda: compiled(tmp_path, fusions={"swigly": False}),
        lambda: compiled(tmp_path, pipeline="normalise,lift,fuse{swigly=off},legalise"),
    ]
    for refuse in refusals:
        with pytest.raises(cannopy.CannopyError, match="did you mean 'swiglu'"):
            refuse()
