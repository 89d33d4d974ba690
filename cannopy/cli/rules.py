"""`cannopy rules`: every rule in the order in which they run, those of your own among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cannopy.cli.common import add_pipeline_arguments, console, print_json, rule_options, verb_parser
from cannopy.environment import import_torch

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.pipeline import Plan

_DESCRIPTION = """\
Lists the fusion rules in the order in which they run: the name by which each is switched (--fusion NAME=off, or
fuse{NAME=off} in --pipeline) and reported, whether it is on, the device op, below them what becomes what, and for rules
of your own where they are defined. Checks rule files, switches and the pipeline without a model: exit code 1 when
something is wrong with them.
"""

_EXAMPLES = """\
  cannopy rules
  cannopy rules --rules my_rules.py                  is the file in order, and where do its rules stand?
  cannopy rules --pipeline 'normalise,lift,fuse{swiglu=off},legalise'
  cannopy rules --json | jq '.rules[] | select(.kernel != "")'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rules` to the command line."""
    parser = verb_parser(subparsers, "rules", run, "the fusion rules, yours among them", _DESCRIPTION, _EXAMPLES)
    add_pipeline_arguments(parser.add_argument_group("pipeline"))


def run(args: argparse.Namespace) -> int:
    """List the rules."""
    import_torch()
    from cannopy import pipeline

    options = rule_options(args)
    made = pipeline.plan(options)
    found = rows(made)
    if args.json:
        print_json({"pipeline": str(options.full_pipeline), "rules": found})
        return 0
    screen = console(args)
    forms: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        forms.setdefault(row["rule"], []).append(row)
    for name, of_rule in forms.items():
        _show(screen, name, of_rule)
    screen.print(f"pipeline: {options.full_pipeline}", markup=False, soft_wrap=True)
    return 0


def _show(screen: Console, name: str, forms: Sequence[dict[str, Any]]) -> None:
    """A block for one rule: name, whether it is on, and device op, then what becomes what, wrapped to the width."""
    from rich.padding import Padding
    from rich.text import Text

    kernels = dict.fromkeys(f["kernel"] for f in forms if f["kernel"])
    head = Text(name, "bold")
    for part in (forms[0]["switch"], *kernels):
        head.append(f"  {part}" if part else "", "not bold")
    screen.print(head)
    for form in forms:
        screen.print(Padding(Text(form["equation"]), (0, 0, 0, 4)))
    for origin in dict.fromkeys(f["origin"] for f in forms if f["origin"]):
        screen.print(f"    defined at {origin}", markup=False, soft_wrap=True)
    screen.print()


def rows(made: Plan) -> list[dict[str, Any]]:
    """One row per rule and equation in the order in which they run; ``origin`` is empty for Cannopy's own."""
    from cannopy.fusion_rules.extension import LIFT
    from cannopy.pipeline_text import FUSE, word

    stages = {stage.name for stage in made.options.full_pipeline.stages}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name in made.order:
        switch = "" if name == LIFT else word(made.options.fusions.get(name, True))
        runs = LIFT if made.order.index(name) <= made.order.index(LIFT) else FUSE
        for rule in made.groups[name]:
            user = made.user.get(rule.name)
            found.setdefault((rule.name, rule.equation), {
                "rule": rule.name,
                "switch": switch if runs in stages else "off",
                "equation": rule.equation,
                "kernel": rule.kernel,
                "origin": user.origin if user else "",
            })
    return list(found.values())
