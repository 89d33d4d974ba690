"""The pipeline as one text, ``normalise,lift,fuse{mla_prolog=off},legalise``: parsed, checked and printed.

    pipeline := stage ("," stage)*
    stage    := name [ "{" option ("," option)* "}" ]
    option   := name "=" value

Spaces around names and values do not matter. Nothing here imports torch, so the command line can check a text before
anything is loaded. The names of fusions are known only with the rules: `Pipeline.check_fusions`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cannopy.errors import OptionError, unknown

FusionSwitch = bool | Literal["require"]
SWITCHES: Mapping[str, FusionSwitch] = {"on": True, "off": False, "require": "require"}

NORMAL, LIFTED, LEGAL, PLANNED = "normal form", "dialect", "legal", "plan"
"""Facts that stages require and ensure."""

FEATURE_SWITCHES = ("auto", "force", "forbid")
"""What the features of a plan can be switched to: where they gain, wherever they are possible, nowhere."""

EXPERT_WAYS = ("auto", "dispatch", "routing")
"""How experts are spread over dies: as the product takes them, by dispatch and combine, or by all-to-alls."""

FUSE = "fuse"
"""The stage whose options are the names of fusions."""


def word(switch: FusionSwitch) -> str:
    """``on``, ``off`` or ``require``."""
    return switch if isinstance(switch, str) else ("on" if switch else "off")


def _rounds(value: str) -> str | None:
    return None if value.isdigit() and 1 <= int(value) <= 64 else "a whole number from 1 to 64"


def _switch(value: str) -> str | None:
    if value in SWITCHES:
        return None
    close = difflib.get_close_matches(value, SWITCHES, n=1)
    return f"on, off or require{f' (did you mean {close[0]!r}?)' if close else ''}"


def _streams(value: str) -> str | None:
    return None if value in (*FEATURE_SWITCHES, "1", "2", "3", "4") else "auto, force, forbid or a budget from 1 to 4"


def _feature(value: str) -> str | None:
    return None if value in FEATURE_SWITCHES else "auto, force or forbid"


def _experts(value: str) -> str | None:
    return None if value in EXPERT_WAYS else "auto, dispatch or routing"


def _share(value: str) -> str | None:
    try:
        return None if 0 <= float(value) < 1 else "a share of the time of a layer, from 0 to below 1"
    except ValueError:
        return "a share of the time of a layer, from 0 to below 1"


@dataclass(frozen=True)
class StageKind:
    """A stage that a pipeline may have.

    ``options`` has for each option a check that gives what is expected when a value is not taken, else None; the
    options of `FUSE` are names of fusions. ``requires`` and ``ensures`` are facts: what an earlier stage must have
    ensured, and what holds afterwards.
    """

    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()
    options: Mapping[str, Callable[[str], str | None]] = field(default_factory=dict)
    repeats: bool = False


STAGES: Mapping[str, StageKind] = {
    "normalise": StageKind(ensures=frozenset({NORMAL}), options={"rounds": _rounds}, repeats=True),
    "lift": StageKind(requires=frozenset({NORMAL}), ensures=frozenset({LIFTED})),
    FUSE: StageKind(requires=frozenset({NORMAL, LIFTED})),
    "parallel": StageKind(requires=frozenset({LIFTED}), options={"experts": _experts}),
    "legalise": StageKind(requires=frozenset({LIFTED}), ensures=frozenset({LEGAL})),
    "weight-layout": StageKind(requires=frozenset({LEGAL})),
    "counters": StageKind(requires=frozenset({LEGAL})),
    "merge-slices": StageKind(requires=frozenset({LEGAL})),
    "schedule": StageKind(
        requires=frozenset({LEGAL}), ensures=frozenset({PLANNED}),
        options={"streams": _streams, "core_limits": _feature, "prefetch": _feature, "super_kernel": _feature,
                 "threshold": _share},
    ),
}
"""Every stage by name, in the order of the default pipeline."""

DEFAULT = ",".join(STAGES)
RESULT = frozenset({LEGAL})
"""What must hold at the end of every pipeline: only then does torchair take the graph."""

_LAST = frozenset({"schedule"})
"""Stages behind which none may stand: what they write into the graph, no other stage reads."""

_TOKEN = re.compile(r"[A-Za-z0-9_.-]+|[,{}=]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class PipelineTextError(OptionError):
    """A pipeline text that cannot be taken. ``position`` is the character at fault, from 0."""

    def __init__(self, problem: str, text: str, position: int, cure: str = "") -> None:
        super().__init__(f"pipeline, character {position + 1}: {problem}\n    {text}\n    {' ' * position}^", cure)
        self.position = position


@dataclass(frozen=True)
class Stage:
    """One stage with its options in the order of their names; ``at`` are the positions of those names in the text."""

    name: str
    options: tuple[tuple[str, str], ...] = ()
    at: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        inner = ",".join(f"{name}={value}" for name, value in self.options)
        return f"{self.name}{{{inner}}}" if inner else self.name

    def get(self, option: str) -> str | None:
        """The value of ``option``, None where the text has none."""
        return dict(self.options).get(option)


@dataclass(frozen=True)
class Pipeline:
    """Stages in order; ``parse(str(p)) == p``."""

    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.stages))

    @property
    def fusions(self) -> dict[str, FusionSwitch]:
        """The switches of the stage `FUSE`."""
        return {name: SWITCHES[value] for stage in self.stages if stage.name == FUSE for name, value in stage.options}

    def with_fusions(self, fusions: Mapping[str, FusionSwitch]) -> Pipeline:
        """This pipeline with ``fusions`` as its switches, those that are on left out: on is what every rule is."""
        options = tuple((name, word(switch)) for name, switch in sorted(fusions.items()) if switch is not True)
        return replace(self, stages=tuple(replace(s, options=options) if s.name == FUSE else s for s in self.stages))

    def lines(self) -> list[str]:
        """The text taken apart, one ``name=value`` per option, so that what changed in it can be named."""
        found = [f"pipeline={','.join(stage.name for stage in self.stages)}"]
        seen: dict[str, int] = {}
        for stage in self.stages:
            seen[stage.name] = seen.get(stage.name, 0) + 1
            name = stage.name if seen[stage.name] == 1 else f"{stage.name} ({seen[stage.name]})"
            found += [f"{name}.{option}={value}" for option, value in stage.options]
        return found

    def check_fusions(self, known: Iterable[str]) -> None:
        """`PipelineTextError` when the stage `FUSE` switches a fusion that is not among ``known``."""
        names = sorted(set(known))
        text = str(self)
        for stage in parse(text).stages:
            for name, _ in stage.options if stage.name == FUSE else ():
                if name not in names:
                    raise PipelineTextError(unknown("fusion", name, names), text, stage.at[name])


def parse(text: str) -> Pipeline:
    """The pipeline that ``text`` says, checked: names, options, values, order, and that its result can be emitted.

    Raises `PipelineTextError` with the position and, for an unknown name, the nearest valid one.
    """
    stages = list(_Parser(text).stages())
    _check_order(text, stages)
    return Pipeline(tuple(stage for stage, _ in stages))


def _check_order(text: str, stages: list[tuple[Stage, int]]) -> None:
    ensured: set[str] = set()
    seen: set[str] = set()
    for index, (stage, at) in enumerate(stages):
        kind = STAGES[stage.name]
        if stage.name in _LAST and index + 1 < len(stages):
            raise PipelineTextError(f"{stages[index + 1][0].name} stands behind {stage.name}, which is the last stage",
                                    text, stages[index + 1][1], f"put {stage.name} at the end")
        if stage.name in seen and not kind.repeats:
            raise PipelineTextError(f"{stage.name} stands here a second time", text, at, "leave one of them out")
        for fact in sorted(kind.requires - ensured):
            later = [s.name for s, _ in stages[index:] if fact in STAGES[s.name].ensures]
            verb = "put" if later else "add"
            raise PipelineTextError(
                f"{stage.name} requires the {fact!r} of {_maker(fact)}, which does not stand before it", text, at,
                f"{verb} {_maker(fact)} before {stage.name}",
            )
        ensured |= kind.ensures
        seen.add(stage.name)
    for fact in sorted(RESULT - ensured):
        raise PipelineTextError(
            f"the pipeline ends without {_maker(fact)}: torchair takes only what it leaves", text, len(text),
            f"add {_maker(fact)} at the end",
        )


def _maker(fact: str) -> str:
    return next(name for name, kind in STAGES.items() if fact in kind.ensures)


class _Parser:
    """One pass over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.next = 0

    def _tokens(self) -> Iterator[tuple[str, int]]:
        position = 0
        while position < len(self.text):
            if self.text[position].isspace():
                position += 1
                continue
            found = _TOKEN.match(self.text, position)
            if found is None:
                raise PipelineTextError(f"unexpected {self.text[position]!r}", self.text, position,
                                        "a pipeline is name,name{option=value,…},…")
            yield found[0], position
            position = found.end()

    def stages(self) -> Iterator[tuple[Stage, int]]:
        """Each stage with the position of its name."""
        while True:
            name, at = self._name("a stage")
            if name not in STAGES:
                raise PipelineTextError(unknown("stage", name, STAGES), self.text, at)
            yield Stage(name, *self._options(name)), at
            if self.next == len(self.tokens):
                return
            self._expect(",", f"',' or the end behind {name}")

    def _options(self, stage: str) -> tuple[tuple[tuple[str, str], ...], dict[str, int]]:
        found: dict[str, str] = {}
        positions: dict[str, int] = {}
        if self._peek() != "{":
            return (), positions
        self.next += 1
        while True:
            name, at = self._name(f"an option of {stage}")
            if name in found:
                raise PipelineTextError(f"{name} is given twice", self.text, at)
            check = self._option_check(stage, name, at)
            self._expect("=", f"'=' behind {name}")
            value, value_at = self._value(name)
            wanted = check(value)
            if wanted is not None:
                raise PipelineTextError(f"{name} of {stage}: expected {wanted}, found {value!r}", self.text, value_at)
            found[name], positions[name] = value, at
            if self._expect(",}", f"',' or '}}' behind {name}={value}") == "}":
                return tuple(sorted(found.items())), positions

    def _option_check(self, stage: str, name: str, at: int) -> Callable[[str], str | None]:
        known = STAGES[stage].options
        if stage == FUSE:
            return _switch
        if name not in known:
            none = f"{stage} has no options, found {name!r}"
            raise PipelineTextError(unknown(f"option of {stage}", name, known) if known else none, self.text, at)
        return known[name]

    def _peek(self) -> str:
        return self.tokens[self.next][0] if self.next < len(self.tokens) else ""

    def _take(self, expected: str) -> tuple[str, int]:
        if self.next == len(self.tokens):
            raise PipelineTextError(f"expected {expected}, found the end", self.text, len(self.text))
        self.next += 1
        return self.tokens[self.next - 1]

    def _name(self, expected: str) -> tuple[str, int]:
        token, at = self._take(expected)
        if not _NAME.fullmatch(token):
            raise PipelineTextError(f"expected {expected}, found {token!r}", self.text, at)
        return token, at

    def _value(self, name: str) -> tuple[str, int]:
        token, at = self._take(f"a value of {name}")
        if token in ",{}=":
            raise PipelineTextError(f"expected a value of {name}, found {token!r}", self.text, at)
        return token, at

    def _expect(self, tokens: str, expected: str) -> str:
        token, at = self._take(expected)
        if token not in tokens:
            raise PipelineTextError(f"expected {expected}, found {token!r}", self.text, at)
        return token
