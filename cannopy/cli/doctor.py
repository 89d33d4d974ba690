"""`cannopy doctor`: what is installed, what is missing, what to do."""

from __future__ import annotations

import argparse

from cannopy.backend.host.standin.examine import Check, examine
from cannopy.cli.common import print_json

_DESCRIPTION = """\
Looks at everything cannopy needs, from the interpreter to a real `import torch, torch_npu, torchair`
in a process of its own, and prints one line for each. Every line that fails carries the command that
cures it. Exit code 0 when nothing fails, 1 otherwise.
"""

_EXAMPLES = """\
examples:
  cannopy doctor                 the table
  cannopy doctor --json          the same for a script: {"ok": ..., "checks": [{"name", "state", ...}]}
  cannopy doctor --no-import     only what can be seen without importing torch (0.1 s instead of 10 s)
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what is missing, what to do",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-import", action="store_true", help="leave out the import test")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Examine this environment and print what was found. 0 when no check failed."""
    checks = examine(import_test=not args.no_import)
    ok = all(check.state != "failed" for check in checks)
    if args.json:
        print_json({"ok": ok, "checks": [check.to_dict() for check in checks]})
    else:
        _print_table(checks)
    return 0 if ok else 1


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(show_edge=False, pad_edge=False)
    for column in ("check", "state", "found"):
        table.add_column(column, overflow="fold")
    colours = {"ok": "green", "optional": "yellow", "failed": "bold red"}
    for check in checks:
        table.add_row(escape(check.name), f"[{colours[check.state]}]{check.state}[/]", escape(check.found))
    console.print(table)
    for check in checks:
        if check.cure:
            # Unwrapped, so that the command can be copied.
            console.print(f"\n{escape(check.name)}: {escape(check.found)}\n  cure: ", end="", soft_wrap=True)
            console.print(escape(check.cure), soft_wrap=True, highlight=False)
