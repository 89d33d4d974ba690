"""`cannopy dump`: the graph after each pass, as text."""

from __future__ import annotations

import argparse
from pathlib import Path

from cannopy.cli.common import add_model_arguments, add_offline_argument, print_json, verb_parser
from cannopy.cli.compile import compile_phase

_DESCRIPTION = """\
Writes the graph as captured and after each pass that changed it, numbered in order, one line per node with shapes,
layer, the rule that made it and the line of the model that it came from. Two neighbours show in a diff what one
pass did. Compiles afresh, whatever the cache holds.
"""

_EXAMPLES = """\
  cannopy dump deepseek-v3.2 --out graphs
  diff graphs/000-captured.txt graphs/001-normalise.txt
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `dump` to the command line."""
    parser = verb_parser(subparsers, "dump", run, "numbered graphs after each pass", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser)
    add_offline_argument(parser)
    parser.add_argument("--out", type=Path, default=Path("graphs"), metavar="DIR", help="folder to write to (graphs)")


def run(args: argparse.Namespace) -> int:
    """Compile with dumps and list the files; 0 when torchair has compiled the graph."""
    passes = compile_phase(args, dump_dir=args.out, use_cache=False).report.passes
    files = sorted(str(path) for path in args.out.glob("[0-9][0-9][0-9]-*.txt"))
    if args.json:
        print_json({"files": files, "passes": passes})
    else:
        print("\n".join(files))
    return 0
