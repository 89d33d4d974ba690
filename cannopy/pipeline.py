"""The table of contents of the compiler: every pass in order, from the captured graph to the one that is emitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cannopy.errors import CannopyError
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.engine.apply import Log, apply
from cannopy.fusion_rules.engine.rule import Context, Rule
from cannopy.fx_passes import counters, legalise, merge_slices, normalise, weight_layout
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.manager import Pass, PassManager, PassRecord
from cannopy.fx_passes.program import Program
from cannopy.options import Options

NORMAL = frozenset({"normal form"})
LIFTED = frozenset({"dialect"})
LEGAL = frozenset({"legal"})


class FusionRequiredError(CannopyError):
    """A fusion was requested and could not be applied."""


@dataclass
class Compilation:
    """What the passes did to one program."""

    log: Log = field(default_factory=Log)
    records: list[PassRecord] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def passes(options: Options, log: Log) -> tuple[Pass, ...]:
    """The pipeline. Each fusion is a pass of its own, followed by normalisation of what it left."""
    steps = [_normalise("normalise", ensures=NORMAL), _rules("lift", catalog.LIFT, options, log, NORMAL, LIFTED),
             _normalise("normalise-lift")]
    for name, rules in catalog.groups().items():
        if options.fusions.get(name, True) is not False:
            steps += [_rules(name, rules, options, log, LIFTED), _normalise(f"normalise-{name}")]
    steps += [
        Pass("legalise", _legalise, requires=LIFTED, ensures=LEGAL),
        Pass("weight-layout", weight_layout.run, requires=LEGAL),
        Pass("counters", counters.run, requires=LEGAL),
        Pass("merge-slices", merge_slices.run, requires=LEGAL),
    ]
    return tuple(steps)


def _legalise(program: Program) -> int:
    return legalise.run(program, dialect.references())


def run(program: Program, options: Options) -> Compilation:
    """Run the passes over ``program`` in place.

    Raises `fx_passes.manager.PassError` when a pass is wrong (the program is then as before that pass) and
    `FusionRequiredError` when a fusion that the options require was not applied at all.
    """
    options.check_fusions(catalog.groups())
    dialect.register_all()
    start = time.perf_counter()
    done = Compilation()
    done.nodes["captured"] = len(program.gm.graph.nodes)
    manager = PassManager(passes(options, done.log), verify=options.verify, dump_dir=options.dump_dir)
    done.records = manager.run(program)
    first = next((r for r in done.records if r.name == "normalise"), None)
    done.nodes["normalised"] = first.nodes_after if first else done.nodes["captured"]
    done.nodes["final"] = len(program.gm.graph.nodes)
    done.seconds = time.perf_counter() - start
    _required(options, done.log)
    return done


def _normalise(name: str, ensures: frozenset[str] = frozenset()) -> Pass:
    return Pass(name, normalise.run, ensures=ensures)


def _rules(name: str, rules: Sequence[Rule], options: Options, log: Log, requires: frozenset[str],
           ensures: frozenset[str] = frozenset()) -> Pass:
    return Pass(name, _runner(rules, options, log), requires, ensures)


def _runner(rules: Sequence[Rule], options: Options, log: Log) -> Callable[[Program], int]:
    def run_rules(program: Program) -> int:
        return apply(rules, Context(program, Editor(program.gm), options.target, options.block_size), log)

    return run_rules


def _required(options: Options, log: Log) -> None:
    counts = log.counts()
    for name, wanted in options.fusions.items():
        if wanted == "require" and not counts.get(name):
            reasons = [f"  {m.reason} ({m.source})" for m in log.misses if m.rule == name]
            text = "\n".join(dict.fromkeys(reasons)) or "  nothing in the graph comes near its pattern"
            raise FusionRequiredError(f"fusion {name} is required and was not applied:\n{text}\n"
                                      f"drop {name}=require, or change the model as the reason says")

