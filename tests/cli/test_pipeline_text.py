"""The pipeline as one text: what it says, what it refuses and where, and that the options and the text agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cannopy import Options
from cannopy.cli import build_parser
from cannopy.cli.common import options_of
from cannopy.errors import OptionError
from cannopy.pipeline_text import DEFAULT, STAGES, PipelineTextError, parse

FUSIONS = ["mla_prolog", "rms_norm", "swiglu"]
TAIL = [name for name in STAGES if name not in ("normalise", "lift", "fuse", "legalise", "schedule")]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Valid pipelines with spaces anywhere, options in any order, any set of the stages that may be left out."""
    switches = draw(st.dictionaries(st.sampled_from(FUSIONS), st.sampled_from(["on", "off", "require"])))
    fuse = "fuse" + ("{ " + ", ".join(f"{k} = {v}" for k, v in switches.items()) + " }" if switches else "")
    rounds = draw(st.sampled_from(["", "{rounds=1}", "{ rounds=64}"]))
    stages = [f"normalise{rounds}", " lift", fuse, *["normalise"] * draw(st.booleans()), "legalise "]
    last = ["schedule{streams=2 , prefetch=forbid}"] * draw(st.booleans())
    return ",".join([*stages, *draw(st.permutations(TAIL))[: draw(st.integers(0, len(TAIL)))], *last])


@settings(max_examples=100, deadline=None)
@given(texts())
def test_round_trip(text: str) -> None:
    parsed = parse(text)
    assert parse(str(parsed)) == parsed
    assert str(parse(str(parsed))) == str(parsed)
    options = Options(pipeline=text)
    assert dict(options.fusions) == parsed.fusions
    assert options == Options(pipeline=str(parsed)) == Options.from_dict(options.to_dict())
    assert Options(pipeline=str(options.full_pipeline)).text() == options.text()


def test_the_default() -> None:
    assert str(parse(DEFAULT)) == DEFAULT
    assert Options() == Options(pipeline=DEFAULT)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("normalise,lft,legalise", 10, "unknown stage 'lft'; did you mean 'lift'"),
        ("normalise{round=2},lift,legalise", 10, "unknown option of normalise 'round'; did you mean 'rounds'"),
        ("normalise{rounds=0},lift,legalise", 17, "expected a whole number from 1 to 64, found '0'"),
        ("normalise,lift,fuse{swiglu=of},legalise", 27, "on, off or require (did you mean 'off'?), found 'of'"),
        ("normalise,lift,fuse{a=on,a=off},legalise", 25, "a is given twice"),
        ("normalise,lift{a=b},legalise", 15, "lift has no options"),
        ("normalise,lift,fuse{a}", 21, "expected '=' behind a, found '}'"),
        ("normalise,lift,fuse{a=off", 25, "found the end"),
        ("normalise lift", 10, "expected ',' or the end"),
        ("normalise,,lift", 10, "expected a stage, found ','"),
        ("normalise;lift", 9, "unexpected ';'"),
        ("", 0, "expected a stage, found the end"),
    ],
)
def test_errors_name_the_place(text: str, position: int, words: str) -> None:
    with pytest.raises(PipelineTextError) as caught:
        parse(text)
    assert caught.value.position == position
    assert words in str(caught.value)
    assert str(caught.value).splitlines()[2].index("^") == position + 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lift,normalise,legalise", "put normalise before lift"),
        ("normalise,legalise", "add lift before legalise"),
        ("normalise,fuse,lift,legalise", "put lift before fuse"),
        ("normalise,lift,fuse", "add legalise at the end"),
        ("normalise,lift,legalise,legalise", "legalise stands here a second time"),
    ],
)
def test_order_is_checked(text: str, words: str) -> None:
    with pytest.raises(PipelineTextError, match=words):
        Options(pipeline=text)


def test_switches_have_one_place() -> None:
    text = "normalise,lift,fuse{mla_prolog=require},legalise"
    one = Options(fusions={"swiglu": False, "rms_norm": True}, pipeline=text)
    assert dict(one.fusions) == {"mla_prolog": "require", "rms_norm": True, "swiglu": False}
    assert one.pipeline == "normalise,lift,fuse,legalise"
    assert str(one.full_pipeline) == "normalise,lift,fuse{mla_prolog=require,swiglu=off},legalise"
    with pytest.raises(OptionError, match="swiglu is off in the pipeline and require in fusions"):
        Options(fusions={"swiglu": "require"}, pipeline="normalise,lift,fuse{swiglu=off},legalise")
    with pytest.raises(OptionError, match="swiglu is required and the pipeline"):
        Options(fusions={"swiglu": "require"}, pipeline="normalise,lift,legalise")


def test_unknown_fusion_is_shown_in_the_text() -> None:
    with pytest.raises(PipelineTextError, match="unknown fusion 'swigly'; did you mean 'swiglu'") as caught:
        Options(pipeline="normalise,lift,fuse{mla_prolog=off,swigly=off},legalise").check_fusions(FUSIONS)
    assert caught.value.position == 35


def test_the_page_is_about_every_stage() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert f"    {DEFAULT}\n" in page
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == list(STAGES)
    for (name, kind), row in zip(STAGES.items(), rows, strict=True):
        assert all(option in row[2] for option in kind.options), name
        makers = {n for n, k in STAGES.items() if k.ensures & kind.requires}
        assert {*re.findall(r"`(\S+?)`", row[3])} == makers, name


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = "normalise,lift,fuse{mla_prolog=off},legalise"
    args = build_parser().parse_args(["run", "m", "--pipeline", text, "--fusion", "swiglu=require", "--rules", "r.py"])
    options = options_of(args)
    assert str(options.full_pipeline) == "normalise,lift,fuse{mla_prolog=off,swiglu=require},legalise"
    assert [path.name for path in options.rules] == ["r.py"]
    with pytest.raises(SystemExit):
        build_parser().parse_args(["run", "m", "--pipeline", "normalise,lft"])
    assert "did you mean 'lift'" in capsys.readouterr().err
