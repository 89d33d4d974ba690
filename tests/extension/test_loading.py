"""Rules from files and entry points: what is taken, what is refused and where, and in which order they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cannopy
from cannopy import Options, pipeline
from cannopy.fusion_rules import catalog
from cannopy.fusion_rules.extension import LIFT, RuleFileError, UserRule, load, place, rule
from cannopy.fx_passes.manager import PassError
from cannopy.rules import Any, aten, op
from cannopy.testing import check_rule

HEAD = "import cannopy\nfrom cannopy.rules import Any, aten, op\n"
RULE = """
@cannopy.rule(equation="a → a", pattern=op(aten.sin.default, Any()), {more})
def {name}(match, context):
    pass
"""


def file(folder: Path, *rules: tuple[str, str], name: str = "mine.py") -> Path:
    """A file with rules of these names and further arguments."""
    path = folder / name
    path.write_text(HEAD + "".join(RULE.format(name=n, more=more) for n, more in rules), encoding="utf-8")
    return path


def made(name: str, **more: str) -> UserRule:
    return rule(name=name, equation="a → a", pattern=op(aten.sin.default, Any()), **more)(lambda match, context: None)


def test_a_file_is_read_anew(tmp_path: Path) -> None:
    path = file(tmp_path, ("first", ""), ("second", "kernel='npu_x', before='swiglu'"))
    first, second = load([path])
    assert (first.name, first.before, first.after) == ("first", None, None)
    assert (second.rule.kernel, second.before) == ("npu_x", "swiglu")
    assert first.origin == f"{path}:4"
    file(tmp_path, ("other", ""))  # within the same second and of another length
    assert [one.name for one in load([path])] == ["other"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "no rule in it"),
        ("x = (\n", r"mine.py:\d: SyntaxError"),
        ("import cannopy\n\n1 / 0\n", r"mine.py:3: ZeroDivisionError"),
        ("import sys\nsys.exit()\n", r"mine.py:2: SystemExit"),
        (HEAD + RULE.format(name="a", more="before='b', after='c'"), "mine.py:4: rule a: give before or after"),
        (HEAD + RULE.format(name="a", more="").replace("→", "="), "mine.py:4: rule a: the equation has no arrow"),
        (HEAD + RULE.format(name="a", more="name='a b'"), "mine.py:4: 'a b' is no name"),
        (HEAD + RULE.format(name="a", more="").replace("op(aten.sin.default, Any())", "Any()"),
         "a pattern starts with an operation"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RuleFileError, match=words):
        load([path])


def test_a_file_that_is_absent() -> None:
    with pytest.raises(RuleFileError, match=r"nowhere\.py does not exist"):
        load([Path("nowhere.py")])


def test_names_are_taken_once(tmp_path: Path) -> None:
    one, two = file(tmp_path, ("a", "")), file(tmp_path, ("a", ""), name="others.py")
    with pytest.raises(RuleFileError, match=r"others.py:4: there is a rule a already, at .*mine.py:4"):
        load([one, two])
    for name in ("swiglu", "lift_rotary", "normalise", "lift"):
        with pytest.raises(RuleFileError, match=f"there is a rule {name} already, one of Cannopy's own"):
            pipeline.plan(Options(rules=(file(tmp_path, ("x", f"name={name!r}")),)))


def test_places() -> None:
    groups = {"one": (), "two": ()}
    rules = [made("last"), made("b", after="a"), made("a", before="two"), made("early", before=LIFT),
             made("c", after="one"), made("d", after="one"), made("behind_lift", after=LIFT)]
    assert place(groups, rules) == ["early", LIFT, "behind_lift", "one", "c", "d", "a", "b", "two", "last"]
    with pytest.raises(RuleFileError, match=r"no group of rules 'tow'; did you mean 'two'"):
        place(groups, [made("a", before="tow")])
    with pytest.raises(RuleFileError, match=r"in a circle: a .*, b "):
        place(groups, [made("a", before="b"), made("b", after="a")])


def test_passes_have_the_rules_in_their_place(tmp_path: Path) -> None:
    path = file(tmp_path, ("early", "before='lift'"), ("mine", "before='swiglu'"), ("last", ""))
    options = Options(rules=path, fusions={"last": False}, pipeline="normalise,lift,fuse{rms_norm=off},legalise")
    plan = pipeline.plan(options)
    names = [step.name for step in pipeline.passes(plan, pipeline.Log())]
    assert names.index("normalise-early") == names.index("early") + 1 < names.index("lift")
    assert names.index("mine") + 2 == names.index("swiglu")
    assert not {"last", "rms_norm", "counters"} & {*names}
    assert {"early", "mine", "last"} <= {*plan.fusions}
    with pytest.raises(cannopy.CannopyError, match="did you mean 'mine'"):
        pipeline.plan(Options(rules=path, fusions={"mime": False}))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    own = list(catalog.groups())
    pipeline.plan(Options(rules=file(tmp_path, ("a", ""))))
    assert pipeline.plan(Options()).fusions == tuple(own)
    assert list(catalog.groups()) == own


def test_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "other_rules-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other-rules\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[cannopy.rules]\na = other_cannopy_rules\nb = other_cannopy_rules:ONE\nc = other_cannopy_rules:NOT\n")
    text = HEAD + RULE.format(name="from_module", more="") + (
        "ONE = cannopy.rule(name='single', equation='a → a', pattern=op(aten.cos.default, Any()))(lambda m, c: None)\n"
        "NOT = 3\n")
    (tmp_path / "other_cannopy_rules.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuleFileError, match=r"entry point c = other_cannopy_rules:NOT of cannopy.rules: expected"):
        load([])
    (folder / "entry_points.txt").write_text("[cannopy.rules]\na = other_cannopy_rules\n")
    assert [one.name for one in load([])] == ["from_module", "single"]


def test_a_check_returns_a_refusal_or_none() -> None:
    made = rule(equation="sin(x) → x", pattern=op(aten.sin.default, Any("x")), check=lambda match, context: "no")
    with pytest.raises(PassError, match="the check of rule wrong returned 'no'; it returns a Refusal or None"):
        check_rule(made(wrong), torch.sin, torch.randn(4, 8))


def wrong(match: object, context: object) -> None:
    raise AssertionError("a rule whose check failed is not applied")
