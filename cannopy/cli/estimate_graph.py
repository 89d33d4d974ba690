"""`cannopy estimate --from-graph`: the final graph of a model, priced."""

from __future__ import annotations

import argparse
from typing import Any, cast

from cannopy.cli import estimate_view
from cannopy.cli.common import console, load_model, needs_no_weights, print_json, working
from cannopy.errors import CannopyError, unknown
from cannopy.options import PHASES, Options, Target
from cannopy.pipeline_text import DEFAULT
from cannopy.stream_scheduler.hardware import UnknownHardwareError, load_hardware


def run_graph(args: argparse.Namespace) -> int:
    """Capture and lower the model without weights, then price each kernel of its graph."""
    target = _family(args.target)
    if args.phase not in PHASES:
        raise CannopyError(unknown("phase", args.phase, PHASES))
    load = argparse.Namespace(
        model=args.model, size=args.size or "tiny", dtype=None, seed=0, phase=args.phase,
        batch=max(1, round(args.batch_per_die)), offline=needs_no_weights(args.model),
        prompt_tokens=None, max_cache_len=None, json=args.json,
        form=args.form, next_n=args.next_n, block_size=None, fusion=[], pipeline=DEFAULT, rules=[], plan=None,
        parallel=args.parallel, rank=args.rank,
    )
    loaded = load_model(load)
    from cannopy import api
    from cannopy.backend.torchair import have_npu
    from cannopy.frontend import state

    if not have_npu():
        from cannopy.backend.host.activate import activate

        activate()
    inputs, kwargs = loaded.make_inputs(args.phase)
    method = loaded.method_of(args.phase)
    screen = console(args)
    with working(screen, f"capturing {args.phase} of {loaded.name} for {args.target}"):
        state.prepare_state(loaded.model, inputs, kwargs, method=method)
        spread = {"parallel": args.parallel, "rank": args.rank} if args.parallel else {}
        options = Options(phase=args.phase, target=target, use_cache=False, **spread)
        program, _ = api.lower(loaded.model, method, inputs, kwargs, options, {})
    from cannopy.prediction import predict

    step, unmapped = predict(program, args.target)
    if args.json:
        from cannopy.cli.estimate import step_dict

        data: dict[str, Any] = step_dict(args, step) | {"priced_by_bytes": unmapped}
        print_json(data | ({"trace": step.trace.to_dict()} if args.trace else {}))
        return 0
    estimate_view.step(screen, step, args)
    if unmapped:
        screen.print("priced by their bytes, no formula: "
                     + ", ".join(f"{name} ({count})" for name, count in sorted(unmapped.items())))
    screen.print("[dim]attention is priced for full caches; quantisation and parallel layout are those of the graph[/]")
    return 0


def _family(target: str) -> Target:
    """The product that the chip called ``target`` belongs to, for which the graph is compiled."""
    try:
        return cast(Target, load_hardware(target).family)
    except UnknownHardwareError as error:
        raise CannopyError(str(error)) from None
