"""`cannopy explain`: why each fusion matched or did not."""

from __future__ import annotations

import argparse
from typing import Any

from cannopy.cli.common import add_model_arguments, add_offline_argument, console, print_json, verb_parser
from cannopy.cli.compile import compile_phase
from cannopy.errors import CannopyError, unknown

_DESCRIPTION = """\
For every place in the graph where a fusion rule matched or came near: the layer, the rule, and, where it did not
apply, the reason and the line of the model's source at which it stopped. Compiles afresh, whatever the cache holds.
"""

_EXAMPLES = """\
  cannopy explain deepseek-v3.2                        decode of the tiny preset
  cannopy explain deepseek-v3.2 --dtype fp32           which contracts a float32 model breaks
  cannopy explain ./my-checkpoint --rule mla_prolog    one rule
  cannopy explain ./my-checkpoint --node mm_12         what was tried at one node
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `explain` to the command line."""
    parser = verb_parser(subparsers, "explain", run, "why each fusion matched or did not", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser)
    add_offline_argument(parser)
    parser.add_argument("--rule", metavar="RULE", help="only this rule")
    parser.add_argument("--node", metavar="NODE", help="only what was tried at, or stopped at, this node of the graph")


def run(args: argparse.Namespace) -> int:
    """Compile and print hits and misses; 0 also when nothing fused."""
    if args.rule:
        from cannopy.environment import import_torch

        import_torch()
        from cannopy.fusion_rules import catalog

        names = sorted({rule.name for rule in (*catalog.LIFT, *catalog.fusions())})
        if args.rule not in names:
            raise CannopyError(unknown("rule", args.rule, names))
    report = compile_phase(args, use_cache=False).report
    hits = [hit for hit in report.hits if _wanted(args, hit, "node")]
    misses = [miss for miss in report.misses if _wanted(args, miss, "node", "anchor")]
    if args.json:
        print_json({"hits": hits, "misses": misses})
        return 0
    from cannopy.report_view import hits_table, misses_table

    screen = console(args)
    for title, table in (("Applied", hits_table(hits)), ("Came near and did not apply", misses_table(misses))):
        screen.print(f"\n[bold]{title}[/]")
        screen.print(table if table.row_count else "nothing")
    if args.node and not (hits or misses):
        text = f"\nNo rule was applied or stopped at a node {args.node!r}. `cannopy dump` shows the names of all nodes."
        screen.print(text, markup=False)
    return 0


def _wanted(args: argparse.Namespace, entry: dict[str, Any], *nodes: str) -> bool:
    if args.rule and entry["rule"] != args.rule:
        return False
    return not args.node or args.node in {entry[name] for name in nodes}
