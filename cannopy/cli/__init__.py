"""The command line: one file per verb, each with ``add_parser(subparsers)`` and ``run(args) -> exit code``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import cannopy
from cannopy.cli import cache, compile, doctor, dump, estimate, explain, host, rules, run, timeline
from cannopy.cli.common import json_only
from cannopy.environment import NotReadyError
from cannopy.errors import unknown

VERBS = {
    "run": run,
    "compile": compile,
    "explain": explain,
    "dump": dump,
    "rules": rules,
    "estimate": estimate,
    "timeline": timeline,
    "cache": cache,
    "doctor": doctor,
    "host": host,
}

EXIT_FAILED = 1
"""The work was done and something failed: a refusal, a parity limit, a missing piece."""
EXIT_CANNOT_START = 2
"""Wrong arguments, or torch and torch_npu cannot be imported here."""

_EPILOG = """\
first steps:
  cannopy doctor                      is everything there? what to do if not
  cannopy host install                on a machine without CANN, once
  cannopy run deepseek-v3.2           compile a tiny DeepSeek-V3.2, run it and check it against eager
  cannopy explain deepseek-v3.2       why each fusion matched or did not

MODEL is a zoo name (deepseek-v3.2, with --size), a Hugging Face checkpoint folder, or path.py:factory.
Every verb has --help with examples and --json for scripts. Exit code 0: done, 1: failed, 2: cannot start.
"""


class _Parser(argparse.ArgumentParser):
    """argparse with errors that name the nearest valid spelling."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\n  see: {self.prog} --help", file=sys.stderr)
        raise SystemExit(EXIT_CANNOT_START)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every verb; imports neither torch nor torch_npu."""
    parser = _Parser(
        prog="cannopy",
        description="Compiles plain PyTorch LLMs into fused graphs for Ascend NPUs, and checks them without one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cannopy {cannopy.__version__}")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS.values():
        verb.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; prints a message instead of a trace for every error of this package."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = _parse(parser, arguments)
    warnings.filterwarnings("ignore", module=r"torch_npu\.")  # deprecations of torch inside that package
    try:
        with json_only() if getattr(args, "json", False) else contextlib.nullcontext():
            code: int = args.func(args)
    except KeyboardInterrupt:
        print("cannopy: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (head) has left
        sys.stderr.close()
        return EXIT_FAILED
    except Exception as error:
        if not _ours(error):
            raise
        _report(error, as_json=bool(getattr(args, "json", False)))
        return EXIT_CANNOT_START if isinstance(error, NotReadyError) else EXIT_FAILED
    return code


def failed(error: Exception) -> int:
    """Print ``error`` and give the exit code of a rank that ends with it; the trace of what is not this package's."""
    if _ours(error):
        _report(error, as_json=False)
    else:
        traceback.print_exception(error)
    return EXIT_FAILED


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    verb = next((a for a in arguments if not a.startswith("-")), None)
    if verb is not None and arguments[0] == verb and verb not in VERBS:
        parser.error(unknown("verb", verb, VERBS))
    args, rest = parser.parse_known_args(arguments)
    if rest:
        command = _subparser(parser, args)
        options = sorted({o for action in command._actions for o in action.option_strings if o.startswith("--")})
        odd = next((a for a in rest if a.startswith("-")), None)
        if odd is not None:
            command.error(unknown("option", odd.split("=")[0], options))
        command.error(f"unexpected argument {rest[0]!r}")
    return args


def _subparser(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the verb that was given, or of its own verb (``cache prune``)."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return _subparser(action.choices[getattr(args, action.dest)], args)
    return parser


def _ours(error: Exception) -> bool:
    """Whether the error is one that this package raises at a user; anything else is a bug and keeps its trace."""
    return any(cls.__module__.startswith("cannopy.") for cls in type(error).__mro__)


def _report(error: Exception, as_json: bool) -> None:
    if as_json:
        problem = {"error": type(error).__name__, "problem": getattr(error, "problem", str(error))}
        cure = getattr(error, "cure", "")
        print(json.dumps(problem | ({"cure": cure} if cure else {}), indent=2))
    else:
        print(f"cannopy: {error}", file=sys.stderr)
