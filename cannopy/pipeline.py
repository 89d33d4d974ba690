"""The table of contents of the compiler: every pass in order, from the captured graph to the one that is emitted."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cannopy import planning
from cannopy.backend.cache.code import CodeWalk
from cannopy.backend.cache.key import described, object_text
from cannopy.backend.cache.text import digest
from cannopy.backend.cann import cann_version
from cannopy.errors import CannopyError
from cannopy.fusion_rules import catalog, dialect, extension
from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.record import by_layer
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.stamped import expand
from cannopy.fusion_rules.extension import LIFT, UserRule
from cannopy.fusion_rules.parallel import stage as parallel
from cannopy.fx_passes import counters, legalise, merge_slices, normalise, regions, stamp, weight_layout
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.manager import Pass, PassError, PassManager, PassRecord
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.program import Program
from cannopy.options import Options
from cannopy.pipeline_text import FUSE, STAGES, Stage

logger = logging.getLogger("cannopy.pipeline")

Step = Callable[[Program], int]
Gate = Callable[[str, Match | None], bool]
"""``gate(name, match)``: whether rule ``name`` may be applied to ``match``, or pass ``name`` may run (match None)."""


class FusionRequiredError(CannopyError):
    """A fusion was requested and could not be applied."""


@dataclass
class Compilation:
    """What the passes did to one program; ``pipeline`` is the text of those that were asked for."""

    log: Log = field(default_factory=Log)
    records: list[PassRecord] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    pipeline: str = ""


@dataclass(frozen=True)
class Plan:
    """The pipeline of one compilation: the stages that the options ask for and the rules in them.

    ``order`` has the names of all groups of rules as they run, ``lift`` among them, and ``groups`` their rules;
    ``user`` are the rules from outside of this package by name.
    """

    options: Options
    order: tuple[str, ...]
    groups: Mapping[str, tuple[Rule, ...]]
    user: Mapping[str, UserRule]

    @property
    def fusions(self) -> tuple[str, ...]:
        """Every group that can be switched, in the order in which they run."""
        return tuple(name for name in self.order if name != LIFT)

    @property
    def rule_names(self) -> list[str]:
        """The names that a report can have: those of the groups and of the rules of the stage lift."""
        return sorted({rule.name for name in self.order for rule in self.groups[name]})

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that define the rules from outside."""
        return tuple(dict.fromkeys(Path(one.file) for one in self.user.values() if one.file))

    def text(self) -> str:
        """What decides the graph besides model and inputs, one ``name=value`` per line; part of the cache key.

        The options, and of each rule from outside its file and the code that it reaches, as digests.
        """
        lines = [self.options.text()]
        if self.options.plan is not None:
            lines.append(f"plan file={_content(self.options.plan)}")
        named: dict[str, int] = {}
        for path in self.files:
            named[path.name] = named.get(path.name, 0) + 1
            number = f" ({named[path.name]})" if named[path.name] > 1 else ""
            lines.append(f"rule file {path.name}{number}={_content(path)}")
        for name, one in self.user.items():
            walk = CodeWalk([], described)
            for part in (one.rule.check, one.rule.rewrite):
                walk.add(part)
            lines.append(f"code of rule {name}={digest(repr(walk.items) + object_text(one.rule))}")
        return "\n".join(lines)


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "absent"


def plan(options: Options) -> Plan:
    """Load the rules of ``options`` and check everything that can be checked before a model is looked at.

    Raises `extension.RuleFileError` for rule files that cannot be used and `OptionError` for a switch of a fusion
    that does not exist.
    """
    own = catalog.groups()
    user = extension.load(options.rules)
    order = extension.place(own, user, taken=[*(rule.name for rule in catalog.LIFT), *STAGES])
    groups = {LIFT: catalog.LIFT, **own, **{one.name: (one.rule,) for one in user}}
    made = Plan(options, tuple(order), groups, {one.name: one for one in user})
    options.check_fusions(made.fusions)
    return made


def passes(made: Plan, log: Log, gate: Gate | None = None) -> tuple[Pass, ...]:
    """The passes of ``made`` in order. Each fusion is a pass of its own, followed by normalisation of what it left.

    ``gate`` is asked before each application of a rule and before each other pass; what it refuses is not done.
    """
    build = _Builder(made, log, gate)
    for stage in made.options.full_pipeline.stages:
        if stage.name in _ACROSS_LAYERS:
            build.stamp()
        build.add(stage)
    build.stamp()
    return tuple(build.passes)


def run(program: Program, options: Options, made: Plan | None = None) -> Compilation:
    """Run the passes over ``program`` in place; ``made`` is the plan of ``options`` where that is known already.

    Raises what `plan` raises, `planning.PlanFileError` for the plan of a user, `fx_passes.manager.PassError` when a
    pass is wrong (the program is then as before that pass) and `FusionRequiredError` when a fusion that the options
    require was not applied at all.
    """
    made = made or plan(options)
    dialect.register_all()
    start = time.perf_counter()
    done = Compilation(pipeline=str(options.full_pipeline))
    logger.info("pipeline %s", done.pipeline)
    done.nodes["captured"] = regions.size(program)
    manager = PassManager(passes(made, done.log), verify=options.verify, dump_dir=options.dump_dir)
    try:
        done.records = manager.run(program)
    except PassError as e:
        if isinstance(e.__cause__, planning.PlanFileError | ParallelError):
            raise e.__cause__ from None
        if e.pass_name in made.user:
            e.args = (f"{e.args[0]}\n  the rule {e.pass_name} is at {made.user[e.pass_name].origin}",)
        raise
    first = next((r for r in done.records if r.name == "normalise"), None)
    done.nodes["normalised"] = first.nodes_after if first else done.nodes["captured"]
    done.nodes["final"] = len(program.gm.graph.nodes)
    expand(done.log, regions.of(program))
    done.seconds = time.perf_counter() - start
    _required(options, done.log)
    return done


class _Builder:
    """Turns stages into passes with names of their own."""

    def __init__(self, made: Plan, log: Log, gate: Gate | None) -> None:
        self.made, self.log, self.gate = made, log, gate
        self.passes: list[Pass] = []

    def add(self, stage: Stage) -> None:
        """The passes of ``stage``."""
        kind = STAGES[stage.name]
        if stage.name == "normalise":
            rounds = int(stage.get("rounds") or normalise.MAX_ROUNDS)
            self._pass(stage.name, functools.partial(normalise.run, max_rounds=rounds), kind.requires, kind.ensures)
        elif stage.name == LIFT:
            at = self.made.order.index(LIFT)
            for name in self.made.order[:at]:
                self._group(name, kind.requires)
            self._rules(LIFT, kind.requires, kind.ensures)
            self._pass(f"normalise-{LIFT}", normalise.run)
        elif stage.name == FUSE:
            for name in self.made.order[self.made.order.index(LIFT) + 1 :]:
                self._group(name, kind.requires)
        elif stage.name == "parallel":
            step = functools.partial(parallel.run, target=self.made.options.target,
                                     way_of_experts=stage.get("experts") or "auto", log=self.log,
                                     decode=self.made.options.phase == "decode")
            self._pass(stage.name, step, kind.requires, kind.ensures)
        elif stage.name == planning.STAGE:
            options = self.made.options
            step = functools.partial(planning.run, stage=stage, target=options.target, plan_file=options.plan)
            self._pass(stage.name, step, kind.requires, kind.ensures)
        else:
            self._pass(stage.name, _OTHER[stage.name], kind.requires, kind.ensures)

    def stamp(self) -> None:
        """The pass that brings back the layers that are missing, once; it cannot be held back."""
        if all(one.name != stamp.NAME for one in self.passes):
            self.passes.append(Pass(stamp.NAME, stamp.run))

    def _group(self, name: str, requires: frozenset[str]) -> None:
        if self.made.options.fusions.get(name, True) is not False:
            self._rules(name, requires)
            self._pass(f"normalise-{name}", normalise.run)

    def _pass(self, name: str, step: Step, requires: frozenset[str] = frozenset(),
              ensures: frozenset[str] = frozenset()) -> None:
        taken = {one.name for one in self.passes}
        own = name if name not in taken else next(n for i in range(2, 99) if (n := f"{name}-{i}") not in taken)

        def guarded(program: Program) -> int:
            return step(program) if self.gate is None or self.gate(own, None) else 0

        self.passes.append(Pass(own, step if self.gate is None else guarded, requires, ensures))

    def _rules(self, name: str, requires: frozenset[str], ensures: frozenset[str] = frozenset()) -> None:
        rules, options, one = self.made.groups[name], self.made.options, self.made.user.get(name)
        if self.gate is not None:
            rules = tuple(_gated(rule, self.gate) for rule in rules)

        def run_rules(program: Program) -> int:
            context = Context(program, Editor(program.gm), options.target, options.block_size, cann_version())
            try:
                return apply(rules, context, self.log)
            except Exception as e:  # whatever the user's code raises; the pass manager rolls back and names the pass
                if one is None:
                    raise
                raise extension.code_error(e, one) from e

        self.passes.append(Pass(name, run_rules, requires, ensures))


def _gated(rule: Rule, gate: Gate) -> Rule:
    """``rule``, refused wherever it could be applied and ``gate`` says no."""

    def check(match: Match, context: Context) -> Refusal | None:
        refusal = rule.check(match, context) if rule.check else None
        return refusal or (None if gate(rule.name, match) else Refusal("held back", match.anchor))

    return replace(rule, check=check)


def _legalise(program: Program) -> int:
    return legalise.run(program, dialect.references())


_ACROSS_LAYERS = frozenset({"counters"})
"""Stages that look at all layers at once, for which every layer must be there."""

_OTHER: Mapping[str, Step] = {
    "legalise": _legalise,
    "weight-layout": weight_layout.run,
    "counters": counters.run,
    "merge-slices": merge_slices.run,
}


def _required(options: Options, log: Log) -> None:
    counts = log.counts()
    for name, wanted in options.fusions.items():
        if wanted == "require" and not counts.get(name):
            kinds = by_layer(m for m in log.misses if m.rule == name)
            reasons = [f"  {m.reason} ({m.source}; {places} places)" + f"\n    to match: {m.remedy}" * bool(m.remedy)
                       for m, _, places in kinds]
            text = "\n".join(reasons) or "  nothing in the graph comes near its pattern"
            raise FusionRequiredError(f"fusion {name} is required and was not applied:\n{text}\n"
                                      f"drop {name}=require, or change the model as the reason says; "
                                      f"`cannopy explain --rule {name}` tells more")
