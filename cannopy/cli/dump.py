"""`cannopy dump`: what each pass did to the graph, as files; `--bisect` finds the rewrite that spoils the result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cannopy.cli.common import (
    add_model_arguments,
    add_offline_argument,
    console,
    load_model,
    options_of,
    print_json,
    verb_parser,
    working,
)

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.bisect import Bisection
    from cannopy.frontend.sources import LoadedModel

_DESCRIPTION = """\
Writes what the compiler did to one call, as files that are the same in every run:

  000-captured.txt, 001-normalise.txt, …   the graph after each pass that changed it, a line per node
  001-normalise.diff, …                    what that pass changed
  provenance.txt                           per node of the final graph: rule, layer, line of the model's source
  writes.txt                               per written input: in place or copied in every call, and why
  key.txt                                  what the key of the compile cache is made of

Nothing is emitted, so neither torchair nor the compile cache takes part.

--bisect writes nothing. It applies only the first n rewrites (single applications of a rule; any other pass counts as
one), runs that graph op by op and compares results and caches with eager in the model's dtype and in float64. It
halves n until it has the rewrite after which a limit is missed, and prints that: rule, anchor, layer, source lines,
what it changed. A rewrite that raises or leaves a graph that does not verify is found the same way. Exit code 1 when
there is one.
"""

_EXAMPLES = """\
  cannopy dump deepseek-v3.2 --out graphs
  cannopy dump deepseek-v3.2 --pipeline 'normalise,lift,fuse{mla_prolog=off},legalise'
  cannopy dump my_model.py:make --rules my_rules.py --bisect
  cannopy dump deepseek-v3.2 --phase prefill --bisect --json | jq .culprit
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `dump` to the command line."""
    parser = verb_parser(subparsers, "dump", run, "numbered graphs with diffs; --bisect", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser)
    add_offline_argument(parser)
    parser.add_argument("--out", type=Path, default=Path("graphs"), metavar="DIR", help="folder to write to (graphs)")
    parser.add_argument("--bisect", action="store_true", help="find the rewrite after which the result is wrong")


def run(args: argparse.Namespace) -> int:
    """Dump or bisect. 0 when it went through and, with ``--bisect``, nothing is wrong."""
    loaded = load_model(args)
    screen = console(args)
    for note in loaded.notes:
        screen.print(note, style="dim")
    return _bisect(args, loaded, screen) if args.bisect else _dump(args, loaded, screen)


def _dump(args: argparse.Namespace, loaded: LoadedModel, screen: Console) -> int:
    from cannopy import dumps

    call_args, call_kwargs = loaded.make_inputs(args.phase)
    options = options_of(args, dump_dir=args.out)
    with working(screen, f"compiling {args.phase} of {loaded.name} for {options.target}"):
        done = dumps.write(loaded.model, loaded.method_of(args.phase), call_args, call_kwargs, options, args.out)
    if args.json:
        print_json(done.to_dict())
        return 0
    for path in done.files:
        screen.print(path, markup=False, style="dim" if path.endswith(".diff") else "")
    screen.print(f"\n{done.summary()}", markup=False)
    return 0


def _bisect(args: argparse.Namespace, loaded: LoadedModel, screen: Console) -> int:
    from cannopy import bisect

    call_args, call_kwargs = _filled(args, loaded)
    options = options_of(args)

    def progress(text: str) -> None:
        screen.print(text, markup=False, style="dim", soft_wrap=True)

    found = bisect.search(loaded.model, loaded.method_of(args.phase), call_args, call_kwargs, options, progress)
    if args.json:
        print_json(found.to_dict())
    else:
        _show(found, screen)
    return 0 if found.clean else 1


def _filled(args: argparse.Namespace, loaded: LoadedModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of the call; a decode step gets a cache that holds the prompt."""
    case = loaded.case
    if case is None or args.phase != "decode" or args.offline:
        return loaded.make_inputs(args.phase)
    filled: tuple[tuple[Any, ...], dict[str, Any]] = case.filled(args.phase)
    return filled


def _show(found: Bisection, screen: Console) -> None:
    def say(text: str, style: str = "") -> None:
        screen.print(text, markup=False, style=style, soft_wrap=True)

    if found.clean:
        say(f"Nothing is wrong: after all {found.steps} rewrites the result is in tolerance.", "bold")
        return
    if found.culprit is None:
        say("The captured graph is out of tolerance before any rewrite:", "bold")
        say(found.problem)
        return
    step = found.culprit
    say(f"\nRewrite {step.number} of {found.steps} is the first after which the result is wrong: {step}", "bold")
    if step.module_path:
        say(f"module   {step.module_path}")
    if step.lines:
        say("lines    " + "\n         ".join(step.lines))
    if found.origin:
        say(f"rule at  {found.origin}")
    say("\n" + found.problem)
    say("\n" + (found.diff or "It raised before it had changed the graph."))
