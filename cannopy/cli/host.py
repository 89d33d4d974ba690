"""`cannopy host`: the CANN stand-in for machines without CANN."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cannopy.backend.host.standin import EnvironmentProblem, StandinStatus
from cannopy.backend.host.standin.install import install_for, uninstall_for
from cannopy.backend.host.standin.status import wheel_status
from cannopy.backend.host.standin.wheel import Search, locate
from cannopy.cli.common import print_json

_DESCRIPTION = """\
torch_npu links against CANN's shared libraries, and `import torch` loads torch_npu, so on a machine
without CANN both fail. `install` builds one small library with the functions which this torch_npu
asks for, and puts it where torch_npu looks: in torch_npu.libs beside the package. It takes a C
compiler and about three seconds. Op schemas, meta kernels, torchair's lowering and cannopy's host
engine then work; torch.npu.is_available() stays False. Where real CANN is installed, it refuses.
"""

_EXAMPLES = """\
examples:
  cannopy host install                       build it for the torch_npu of this interpreter
  cannopy host status                        installed, stale, missing, foreign or not needed, and the cure
  cannopy host status --json                 the same for a script; exit code 0 when torch_npu can import
  cannopy host install --python ~/v/bin/python     for another virtual environment
  cannopy host uninstall                     before installing real CANN: removes what install wrote, no more

After an upgrade of torch_npu, run `cannopy host install` again; it rebuilds only when it has to.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `host install|uninstall|status` to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    host = subparsers.add_parser(
        "host",
        help="the CANN stand-in for machines without CANN: install, uninstall, status",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    verbs = host.add_subparsers(dest="host_verb", required=True, metavar="install|uninstall|status")
    for verb, text in (
        ("install", "build the stand-in and put it beside torch_npu"),
        ("uninstall", "remove what install wrote; files of other origin stay"),
        ("status", "say whether it is there, whether it fits, and what to do"),
    ):
        parser = verbs.add_parser(verb, help=text, description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--python", metavar="PATH", help="act on the torch_npu of this interpreter")
        where.add_argument("--site-packages", metavar="DIR", type=Path, help="act on the torch_npu in this folder")
        if verb == "install":
            parser.add_argument(
                "--force",
                action="store_true",
                help="rebuild even when up to date, and overwrite files of the same names that cannopy did not write",
            )
        parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Carry out one `cannopy host` verb. 0 when torch_npu can import afterwards (uninstall: when it was removed)."""
    try:
        search = _search(args)
        if args.host_verb == "install":
            result = install_for(search, args.force)
        elif args.host_verb == "uninstall":
            result = uninstall_for(search)
        else:
            result = wheel_status(locate(search))
    except EnvironmentProblem as error:
        return _report_problem(error, args.json)
    if args.json:
        print_json(result.to_dict())
    else:
        print(_sentence(args.host_verb, result))
    return 0 if result.usable or args.host_verb == "uninstall" else 1


def _search(args: argparse.Namespace) -> Search:
    if args.python:
        return Search.interpreter(args.python)
    return Search.site(args.site_packages) if args.site_packages else Search.here()


def _report_problem(error: EnvironmentProblem, as_json: bool) -> int:
    if as_json:
        problem: dict[str, Any] = {"state": "error", "problem": error.problem, "cure": error.cure}
        print_json(problem)
    else:
        print(error, file=sys.stderr)
    return 1


def _sentence(verb: str, result: StandinStatus) -> str:
    lines = [f"{result.state}: {result.reason}"]
    if verb == "uninstall":
        lines = ["removed" if result.changed else "nothing to remove"]
        if result.state == "foreign":
            lines.append(f"  kept: {result.reason}")
        return "\n".join(lines)
    if verb == "install":
        lines[0] += "" if result.changed else " (nothing was changed)"
    if result.libraries:
        lines.append(f"  {result.folder}: {len(result.libraries)} libraries, {result.symbols} functions")
    if result.cure:
        lines.append(f"  cure: {result.cure}")
    return "\n".join(lines)
