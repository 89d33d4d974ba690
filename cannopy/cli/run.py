"""`cannopy run`: compile a model, run it, and check it against eager."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cannopy.cli import auto_layout
from cannopy.cli.common import (
    add_model_arguments,
    console,
    load_model,
    options_of,
    positive,
    print_json,
    verb_parser,
    working,
)
from cannopy.cli.world import AUTO, World, joined, with_part
from cannopy.environment import import_torch
from cannopy.errors import CannopyError
from cannopy.options import Options

if TYPE_CHECKING:
    from cannopy.frontend.generation import Phase
    from cannopy.frontend.sources import LoadedModel

_DESCRIPTION = """\
Compiles the model's prefill and decode, runs a prompt and some greedy decode steps, and runs the same in eager mode,
in the model's dtype and in float64. Prints what fused in which layers, what came near and did not and why, the
device kernels, parity, and times. Without an NPU the compiled graph runs on the host engine: what torchair would
submit, op by op on the CPU. Its results are checked; its times say nothing about a device.

Parity: per token, the compiled result is at most 1.25 times as far from float64 as the plain eager run in the median,
1.5 times at the 90th percentile, and 4 times in the largest. Experts and indexer keys picked by the compiled run are
replayed in the other two; every pick must be a tie or better on the float64 scores.

--form serving takes the zoo's own model with packed tokens and a paged cache: prompts of different lengths in one call,
then decode steps of 1 + next_n tokens per request, of which every request keeps another number. The rows that a step
writes into the cache are measured like results; every other row must keep its bits.

--parallel spreads the model over the ranks that torchrun has started, one die each: gloo between processes of a host,
HCCL between NPUs. Every data-parallel rank has requests of its own and is compared with eager mode on them; rank 0
prints its report and a line per rank. A rank that dies or hangs ends all others within --group-timeout.

Exit code 1 when one of these fails, on all ranks when it is on one.
"""

_EXAMPLES = """\
  cannopy run deepseek-v3.2                          tiny preset, both phases, 96 tokens and 8 steps
  cannopy run deepseek-v3.2 --batch 8 --prompt-tokens 200 --steps 2
  cannopy run deepseek-v3.2 --phase decode --target atlas-950
  cannopy run deepseek-r1 --form serving --batch 3 --next-n 1 --block-size 128
  cannopy run ./my-checkpoint --out report           also writes report/report.json and report/index.html
  cannopy run my_model.py:make --phase decode        a factory: def make(): return module, "forward", (x,)
  cannopy run deepseek-v3.2 --json | jq .parity.failures
  torchrun --nproc-per-node 4 -m cannopy run deepseek-v3.2 --parallel ep=4,dp=4,dense_tp=2
"""

_PHASES = ("prefill", "decode", "both")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = verb_parser(subparsers, "run", run, "compile a model, run it, check it", _DESCRIPTION, _EXAMPLES)
    add_model_arguments(parser, phases=_PHASES, phase="both", running=True)
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="decode steps (8)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.json and index.html there")


def run(args: argparse.Namespace) -> int:
    """Compile, run, measure and report. 0 when every parity limit held, on every rank."""
    loaded = layouts = None
    if args.parallel == AUTO:
        loaded = load_model(args)
        layouts = auto_layout.of_world(args, loaded)
        args.parallel = str(layouts.best[0].parallel)
    options = options_of(args)
    if options.parallel is not None:
        import_torch()
    with joined(options) as here:
        if layouts is not None:
            auto_layout.show(here.console(console(args)), layouts)
        return _run(args, options, here, loaded or load_model(args))


def _run(args: argparse.Namespace, options: Options, here: World, loaded: LoadedModel) -> int:
    screen = here.console(console(args))
    loaded = _own_requests(loaded, options, here)
    from cannopy import trial as trials
    from cannopy.cli.run_view import show, show_ranks

    phases: tuple[Phase, ...] = ("prefill", "decode") if args.phase == "both" else (args.phase,)
    screen.print(f"[bold]{loaded.name}[/] for {options.target}")
    for note in loaded.notes:
        screen.print(note, style="dim")
    trial = trials.run(loaded, options, phases, args.steps, progress=lambda text: working(screen, text))
    ranks = here.exchange("the run", trial.verdict(), options.cache_timeout)
    passed = all(rank["passed"] for rank in ranks)
    show(screen, trial)
    if here.layout is not None:
        show_ranks(screen, ranks)
    if here.rank:
        return 0 if passed else 1
    if not passed:
        screen.print("cannopy dump MODEL --bisect, with the same options, tells which rewrite of the graph is wrong")
    if args.out:
        from cannopy.page import write_report

        for path in write_report(trial, args.out):
            screen.print(f"wrote {path}", style="dim")
    if args.json:
        print_json(trial.to_dict() | ({"ranks": ranks, "passed": passed} if here.layout is not None else {}))
    return 0 if passed else 1


def _own_requests(loaded: LoadedModel, options: Options, here: World) -> LoadedModel:
    """``loaded`` with the requests of this rank's replica, in rows of the length that all ranks have."""
    if here.layout is None:
        return loaded
    from cannopy.frontend.serving import ServingCase

    loaded = with_part(loaded, here.layout)
    kvp = here.layout.parallel.kvp
    if kvp > 1 and not isinstance(loaded.case, ServingCase):
        raise CannopyError(f"kvp={kvp} spreads the rows of paged caches, and {loaded.name} has none that run knows",
                           "--form serving, or a layout without kvp")
    if loaded.case is None:
        return loaded
    case = replace(loaded.case, seed=loaded.case.seed + here.replica)
    if isinstance(case, ServingCase):
        rows = here.exchange("the prompts", {"packed": case.packed_tokens}, options.cache_timeout)
        case = replace(case, least_packed=max(row["packed"] for row in rows))
    return replace(loaded, case=case, make_inputs=case.inputs)
