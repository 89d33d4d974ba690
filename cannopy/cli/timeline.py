"""`cannopy timeline`: a picture of the plan of a graph."""

from __future__ import annotations

import argparse
from pathlib import Path

from cannopy.cli.common import (
    add_model_arguments,
    console,
    load_model,
    needs_no_weights,
    options_of,
    print_json,
    verb_parser,
    working,
)
from cannopy.errors import CannopyError

_DESCRIPTION = """\
Captures and fuses one phase of the model without weights, plans its streams, core limits, prefetches and SuperKernel
regions, and writes into a folder:

  timeline.html   the plan beside the same kernels on one stream: open it in a browser, it loads nothing from elsewhere
  trace.json      the same for https://ui.perfetto.dev
  plan.yaml       the plan, to read, to edit and to give back with --plan

Times are predicted by the cost model. Nothing is compiled with torchair and nothing runs.
"""

_EXAMPLES = """\
  cannopy timeline deepseek-v3.2 --size full --out plan      open plan/timeline.html
  cannopy timeline deepseek-v3.2 --pipeline 'normalise,lift,fuse,legalise,schedule{streams=1}'
  cannopy timeline deepseek-v3.2 --plan plan/plan.yaml       a plan that was edited
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `timeline` to the command line."""
    parser = verb_parser(subparsers, "timeline", run, "a picture of the plan: streams, cores, prefetches", _DESCRIPTION,
                         _EXAMPLES)
    add_model_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("timeline"), metavar="DIR", help="folder to write (timeline)")


def run(args: argparse.Namespace) -> int:
    """Plan and draw; 0 when the files are written."""
    if args.out.exists() and not args.out.is_dir():
        raise CannopyError(f"--out {args.out}: it is a file", "name a folder")
    options = options_of(args)
    if all(stage.name != "schedule" for stage in options.full_pipeline.stages):
        raise CannopyError(f"the pipeline {options.pipeline} has no stage schedule, so there is no plan to draw",
                           "add ,schedule at the end")
    args.offline = needs_no_weights(args.model)
    loaded = load_model(args)
    from cannopy import api, timelines
    from cannopy.backend.torchair import have_npu
    from cannopy.frontend import state
    from cannopy.planning import PLANNED, Planned
    from cannopy.report_view import plan_line
    from cannopy.stream_scheduler.plan.text import to_yaml
    from cannopy.stream_scheduler.timeline import payload

    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    screen = console(args)
    inputs, kwargs = loaded.make_inputs(args.phase)
    method = loaded.method_of(args.phase)
    with working(screen, f"capturing and planning {args.phase} of {loaded.name} for {options.target}"):
        state.prepare_state(loaded.model, inputs, kwargs, method=method)
        program, _ = api.lower(loaded.model, method, inputs, kwargs, options, {})
        planned: Planned = program.facts[PLANNED]
        if not planned.schedule.tasks:
            raise CannopyError(f"{loaded.name} has no kernel in {args.phase}: there is nothing to draw")
        runs = planned.runs()
        picture = payload(runs, planned.machine, planned.plan.lower_bound_us, planned.plan.decisions)
        about = [("target", options.target), ("phase", args.phase), ("kernels", str(len(planned.schedule.tasks)))]
        files = [timelines.write_page(picture, args.out / "timeline.html", f"{loaded.name}: {args.phase}", about),
                 timelines.write_trace(runs, planned.machine, args.out / "trace.json"), args.out / "plan.yaml"]
        files[2].write_text(to_yaml(planned.plan, planned.schedule), encoding="utf-8")
    report = planned.report()
    if args.json:
        print_json(report | {"files": [str(file) for file in files]})
        return 0
    screen.print(plan_line(report))
    for file in files:
        screen.print(f"wrote {file}", style="dim")
    return 0
