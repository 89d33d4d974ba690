"""`cannopy compile`: one phase, compiled and put into the compile cache, not run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cannopy.cli import auto_layout
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
from cannopy.cli.world import AUTO

if TYPE_CHECKING:
    from cannopy.api import Compiled

_DESCRIPTION = """\
Captures one phase of the model, fuses it, and compiles it with torchair. The result goes into the compile cache,
where a later process with the same model, inputs and versions finds it. Prints the report: what fused, what came
near and did not and why, and the device kernels that are left.

With --offline no weights and no NPU are needed. Copy the cache folder to the machine that has them (modes that let
others write are refused there): a process with the same model, call, options and versions hits, another is told what
differs. Checked here: capture, every pass, torchair's lowering. Not checked here: that the device's graph compiler
takes the graph, which it compiles at the first call there, the kernels themselves, and times.
"""

_EXAMPLES = """\
  cannopy compile deepseek-v3.2                           decode of the tiny preset, for Atlas A3
  cannopy compile deepseek-v3.2 --phase prefill --prompt-tokens 128
  cannopy compile ./DeepSeek-V3.2 --batch 8 --cache-dir ./artifacts
  cannopy compile my_model.py:make --fusion mla_prolog=require
  cannopy compile ./DeepSeek-V3.2 --offline --target atlas-950   only config.json is read
  cannopy compile deepseek-r1 --form serving --batch 3 --next-n 1   packed tokens, paged cache, 2 tokens per request
  cannopy compile deepseek-v3.2 --size full --form serving --offline --rank 0 \\
      --parallel examples/parallel/deepseek-v3.2.yaml       the graph of one die of 128
  cannopy compile longcat-flash --size full --form serving --offline --batch 4 --parallel auto --dies 128
  cannopy compile deepseek-v3.2 --json | jq .kernels
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `compile` to the command line."""
    parser = verb_parser(subparsers, "compile", run, "compile one phase, without running it", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser)
    add_offline_argument(parser)
    auto_layout.add_dies_argument(parser)
    parser.add_argument("--dump-dir", type=Path, metavar="DIR", help="write the graph after each pass as text")


def run(args: argparse.Namespace) -> int:
    """Compile and print the report; 0 when torchair has compiled the graph."""
    auto_layout.check(args)
    compiled = compile_phase(args, dump_dir=args.dump_dir)
    offline = _offline(args, compiled) if args.offline and not args.no_cache else {}
    if args.json:
        print_json(compiled.report.to_dict() | ({"offline": offline} if offline else {}))
    else:
        screen = console(args)
        screen.print(compiled.report)
        if offline:
            screen.print(f"for other machines: {offline['entry']}\n  needs there: {offline['needs']}\n"
                         f"  checked here: {offline['checked']}\n  not checked here: {offline['not_checked']}",
                         soft_wrap=True, markup=False)
    return 0


def _offline(args: argparse.Namespace, compiled: Compiled) -> dict[str, str]:
    """Where the entry is, what a machine needs to load it, and what is known about it."""
    from cannopy.backend.cache.folder import absolute, entry_path

    artifact = compiled.model.artifact
    details = artifact.fingerprint.details
    needs = {**details["target"], **details["versions"]}
    return {
        "entry": str(entry_path(absolute(args.cache_dir), artifact.model_class, artifact.fingerprint.key)),
        "needs": ", ".join(f"{name} {value}" for name, value in sorted(needs.items())),
        "checked": "capture, passes, torchair's lowering",
        "not_checked": "the device's graph compiler, which works at the first call there; its kernels; times",
    }


def compile_phase(args: argparse.Namespace, dump_dir: Path | None = None, use_cache: bool | None = None) -> Compiled:
    """What the arguments ask for, compiled; progress goes to the screen."""
    loaded, layouts = None, None
    if getattr(args, "parallel", None) == AUTO:
        loaded = load_model(args)
        layouts = auto_layout.for_graph(args, loaded)
        args.parallel = str(layouts.best[0].parallel)
    options = options_of(args, dump_dir=dump_dir)
    loaded = loaded or load_model(args)
    from dataclasses import replace

    import cannopy

    if use_cache is not None:
        options = replace(options, use_cache=use_cache, keep_weights=options.keep_weights and use_cache)
    screen = console(args)
    for note in loaded.notes:
        screen.print(note, style="dim")
    if layouts is not None:
        auto_layout.show(screen, layouts)
    call_args, call_kwargs = loaded.make_inputs(args.phase)
    with working(screen, f"compiling {args.phase} of {loaded.name} for {options.target}"):
        return cannopy.compile(loaded.model, loaded.method_of(args.phase), call_args, call_kwargs, options)
