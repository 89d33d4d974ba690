"""`cannopy rules`: every rule in the order in which they run, those of your own among them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cannopy.cli.common import add_pipeline_arguments, console, print_json, verb_parser
from cannopy.environment import import_torch
from cannopy.options import Options

if TYPE_CHECKING:
    from cannopy.pipeline import Plan

_DESCRIPTION = """\
Lists the fusion rules in the order in which they run: the name by which each is switched (--fusion NAME=off, or
fuse{NAME=off} in --pipeline) and reported, what becomes what, the device op, and for rules of your own where they are
defined. Checks rule files, switches and the pipeline without a model: exit code 1 when something is wrong with them.
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

    options = Options(fusions=dict(args.fusion), pipeline=args.pipeline, rules=tuple(args.rules))
    made = pipeline.plan(options)
    found = rows(made)
    if args.json:
        print_json({"pipeline": str(options.full_pipeline), "rules": found})
        return 0
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    columns = {"rule": "rule", "switch": "switch", "equation": "what becomes what", "kernel": "device op"}
    if made.user:
        columns["origin"] = "defined at"
    for column in columns.values():
        table.add_column(column, overflow="fold")
    for row in found:
        table.add_row(*(escape(row[key]) for key in columns))
    screen = console(args)
    screen.print(table)
    screen.print(f"\npipeline: {options.full_pipeline}", markup=False, soft_wrap=True)
    return 0


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
