"""`cannopy estimate`: step time, memory and bounds of a model on a target, or the time of one kernel."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from cannopy.cli import auto_layout, estimate_view
from cannopy.cli.common import console, positive, print_json, verb_parser
from cannopy.cli.world import AUTO
from cannopy.errors import CannopyError, unknown

_DESCRIPTION = """\
Predicts, without a device, how long one step of a model takes on one die of an Ascend target: a simulation of its
kernels in their streams, with a lower bound beside it, a table per kernel, and the memory of the die. MODEL is the
name of a described model (see --models); quantisation and parallel layout are arguments, whatever a graph can do
today. With --from-graph, MODEL is compiled (as `cannopy compile --offline` takes it) and its final graph is priced.

--kernel prices one kernel at given sizes; --kernels lists kernels and their sizes.
Predictions come from formulas with constants fitted on published measurements: docs/accuracy.md shows every point.
"""

_EXAMPLES = """\
  cannopy estimate deepseek-v3.2 --batch-per-die 4 --context 65536 --next-n 3 --quant w8a8c8 \\
      --parallel ep=128,dp=128,o_proj_tp=4,dense_tp=4,embed_tp=16,lm_head_tp=16 --accepted 1.44
  cannopy estimate longcat-flash --plan expert --parallel ep=128,dp=128,o_proj_tp=8,dense_tp=8 --quant w8a8
  cannopy estimate deepseek-r1 --parallel ep=32,dp=32 --sweep batch=1..512 --svg sweep.svg
  cannopy estimate longcat-flash --parallel auto --dies 128 --batch-per-die 4 --context 4608
  cannopy estimate deepseek-v3.2 --parallel examples/parallel/deepseek-v3.2.yaml --batch-per-die 4
  cannopy estimate --kernel int8_matmul m=256 k=7168 n=4096 --cores 24,48 --json
  cannopy estimate deepseek-v3.2 --from-graph --size tiny
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `estimate` to the command line."""
    parser = verb_parser(subparsers, "estimate", run, "step time, bounds and memory on a target", _DESCRIPTION,
                         _EXAMPLES)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a described model (--models), or with --from-graph "
                        "anything that `cannopy compile` takes")
    parser.add_argument("sizes", metavar="SIZE=VALUE", nargs="*", help="sizes of --kernel")
    parser.add_argument("--target", metavar="NAME", default="atlas-a3",
                        help="product (atlas-a2, atlas-a3, atlas-950) or SoC name such as Ascend910_9362 (atlas-a3)")
    group = parser.add_argument_group("step")
    group.add_argument("--size", metavar="SIZE", help="full (the default); tiny and small are priced from their graph")
    group.add_argument("--form", choices=("stock", "serving"), default="stock",
                       help="of a graph (stock), see cannopy run --help")
    group.add_argument("--phase", choices=("decode", "prefill"), default="decode", help="(decode)")
    group.add_argument("--batch-per-die", type=_number, default=1, metavar="B", help="sequences per die (1); below 1: "
                       "only that share of the dies has one")
    group.add_argument("--context", type=positive, default=4096, metavar="N",
                       help="cached tokens per sequence; in prefill, tokens of the prompt (4096)")
    group.add_argument("--next-n", type=int, default=0, metavar="N", help="draft tokens that each step verifies (0)")
    group.add_argument("--accepted", type=_number, metavar="X",
                       help="drafts accepted per step on average, for the time per output token")
    group.add_argument("--quant", default="bf16", metavar="NAME",
                       help="bf16, w8a8c16, w8a8c8, w4a8c16 or w4a8c8: W of the weights, C of the cache (bf16)")
    group.add_argument("--parallel", default="", metavar="K=N,…|FILE|auto",
                       help="dies: ep, dp, attn_tp, o_proj_tp, dense_tp, embed_tp, lm_head_tp, moe_tp, kvp (all 1), a "
                            "YAML file with them, or auto: the fastest that fits --dies")
    group.add_argument("--rank", type=int, default=0, metavar="R", help="of a graph: the die of --parallel (0)")
    auto_layout.add_dies_argument(group)
    group.add_argument("--plan", choices=("serial", "expert"), default="serial",
                       help="serial: one stream; expert: side streams, core limits, prefetch and SuperKernel as "
                            "expert-written models place them (serial)")
    group.add_argument("--from-graph", action="store_true", help="compile MODEL and price its final graph")
    group.add_argument("--sweep", metavar="NAME=A..B", help="doubles batch or context from A to B")
    group.add_argument("--svg", type=Path, metavar="FILE", help="where --sweep draws its curve")
    group.add_argument("--top", type=positive, default=20, metavar="N", help="rows of the table of kernels (20)")
    group.add_argument("--trace", action="store_true", help="with --json: every interval of the simulation")
    group.add_argument("--timeline", type=Path, metavar="DIR",
                       help="write a picture of the step there: one stream, the expert's plan and the scheduler's side "
                            "by side (timeline.html, trace.json for ui.perfetto.dev, plan.yaml)")
    group.add_argument("--models", action="store_true", help="list the described models")
    group = parser.add_argument_group("one kernel")
    group.add_argument("--kernel", metavar="NAME", help="kernel to price, with SIZE=VALUE arguments")
    group.add_argument("--cores", metavar="CUBE,VECTOR", help="cores that the kernel gets (all)")
    group.add_argument("--l2", type=_number, default=0.0, metavar="SHARE", help="share of its weights in L2 (0)")
    group.add_argument("--kernels", action="store_true", help="list kernels and their sizes")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, found {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the estimate; 1 when the step does not fit the memory of the die."""
    if args.kernels or args.models:
        return _listing(args)
    if args.kernel:
        return _kernel(args)
    if not args.model:
        raise CannopyError("a MODEL or --kernel is missing", "cannopy estimate --models, cannopy estimate --kernels")
    if args.sizes:
        raise CannopyError(f"{args.sizes[0]!r} is a size of a kernel, and no --kernel is given")
    _check(args)
    args.layouts = _proposed(args) if args.parallel == AUTO else None
    if args.sweep:
        return _sweep(args)
    if args.from_graph or args.size in ("tiny", "small"):
        from cannopy.cli.estimate_graph import run_graph

        return run_graph(args)
    return _step(args)


def _check(args: argparse.Namespace) -> None:
    """`CannopyError` for arguments that say nothing together."""
    if args.timeline and (args.sweep or args.from_graph or args.size in ("tiny", "small")):
        raise CannopyError("--timeline draws one step of a described model",
                           "of a graph: cannopy timeline MODEL --out DIR")
    if args.timeline and args.timeline.exists() and not args.timeline.is_dir():
        raise CannopyError(f"--timeline {args.timeline}: it is a file", "name a folder")
    auto_layout.check(args)
    if args.accepted is not None and args.accepted > args.next_n and not args.from_graph:
        raise CannopyError(f"--accepted {args.accepted:g} is more than the {args.next_n} drafts of a step",
                           "give the number of drafts with --next-n")
    if args.from_graph or args.size in ("tiny", "small"):
        if args.sweep:
            raise CannopyError("--sweep takes a described model, not a graph, whose sizes are fixed")
        drafts = args.next_n and args.form != "serving"
        auto = args.parallel == AUTO
        for name, given in (("--parallel auto", auto), ("--quant", args.quant != "bf16"), ("--next-n", drafts),
                            ("--plan", args.plan != "serial")):
            if given:
                raise CannopyError(f"{name} is for described models; a graph is priced as it is")
    elif args.form != "stock":
        raise CannopyError(f"--form {args.form} is of a graph", "--from-graph")
    if args.svg and not args.sweep:
        raise CannopyError("--svg draws the curve of a --sweep", "--sweep batch=1..512")
    if args.svg and not args.svg.absolute().parent.is_dir():
        raise CannopyError(f"--svg {args.svg}: there is no folder {args.svg.absolute().parent}")
    if args.trace and (args.sweep or not args.json):
        raise CannopyError("--trace is part of the --json of one step", "leave --sweep out, add --json")


def _listing(args: argparse.Namespace) -> int:
    from cannopy.stream_scheduler.cost import kernel, kernel_names
    from cannopy.stream_scheduler.network.model import load_model, model_names

    if args.models:
        data = {name: load_model(name).title for name in model_names()}
        lines = [f"{name:22} {title}" for name, title in data.items()]
    else:
        data = {name: kernel(name).usage() for name in kernel_names()}
        lines = [f"{name:30} {usage}" for name, usage in data.items()]
    if args.json:
        print_json(data)
    else:
        print("\n".join(lines))
    return 0


def _kernel(args: argparse.Namespace) -> int:
    from cannopy.stream_scheduler.cost import Share, estimate, kernel

    sizes: dict[str, float] = {}
    for text in [*([args.model] if args.model else []), *args.sizes]:
        name, _, value = text.partition("=")
        if name in sizes:
            raise CannopyError(f"size {name} is given twice")
        try:
            sizes[name] = float(value)
        except ValueError:
            raise CannopyError(f"expected SIZE=NUMBER, found {text!r}", f"sizes of {args.kernel}: "
                               f"{_said(lambda: kernel(args.kernel).usage())}") from None
    hardware = _hardware(args)
    cube, vector = _cores(args.cores, hardware)
    found = _said(lambda: estimate(
        args.kernel, sizes, hardware=hardware,
        share=Share(cube_cores=cube, vector_cores=vector, l2_weights=args.l2)))
    if args.json:
        work = found.work.to_dict()
        print_json({"kernel": args.kernel, "us": found.us, "bytes": work["bytes"], "macs": work["macs"],
                    "bound": found.bound, "target": args.target, **{k: v for k, v in found.to_dict().items()
                                                                     if k not in ("us", "bound")}, "work": work})
    else:
        estimate_view.kernel(console(args), found)
    return 0


def _cores(text: str | None, hardware: Any) -> tuple[int | None, int | None]:
    """``24,48`` as cube and vector cores, as many as the chip has at most."""
    if text is None:
        return None, None
    parts = text.split(",")
    if len(parts) != 2 or not all(p.strip().isdecimal() for p in parts):
        raise CannopyError(f"--cores takes cube and vector cores, found {text!r}", "--cores 24,48")
    cube, vector = int(parts[0]), int(parts[1])
    if cube > hardware.cube_cores or vector > hardware.vector_cores:
        raise CannopyError(f"--cores {text} is more than {hardware.soc} has: {hardware.cube_cores} cube and "
                           f"{hardware.vector_cores} vector cores")
    return cube, vector


def _hardware(args: argparse.Namespace) -> Any:
    from cannopy.stream_scheduler.hardware import load_hardware

    return _said(lambda: load_hardware(args.target))


def _said(call: Any) -> Any:
    """``call()``, with the messages of the cost model as errors of the command line."""
    try:
        return call()
    except ValueError as error:
        raise CannopyError(str(error)) from None


def settings(args: argparse.Namespace, **changes: Any) -> tuple[Any, ...]:
    """Model, load, layout, quantisation, hardware and placement of the arguments."""
    from cannopy.options import sizes_of
    from cannopy.stream_scheduler.network.model import load_model
    from cannopy.stream_scheduler.network.report import placement_of
    from cannopy.stream_scheduler.network.setting import Load, Parallel, Quantisation

    if args.size not in (None, "full"):
        raise CannopyError(unknown("size", args.size, ("full", "small", "tiny")))
    model = _said(lambda: load_model(args.model))
    load = _said(lambda: Load(args.phase, args.batch_per_die, args.context, args.next_n))
    load = _said(lambda: dataclasses.replace(load, **changes))
    parallel = _said(lambda: Parallel(**dataclasses.asdict(sizes_of(args.parallel) or Parallel())))
    hardware = _hardware(args)
    return (model, load, parallel, _said(lambda: Quantisation.parse(args.quant)), hardware,
            placement_of(model, hardware, args.plan))


def _proposed(args: argparse.Namespace) -> Any:
    """The layouts of ``--parallel auto``; the arguments get the first one and the sequences of its dies."""
    args.parallel = ""
    model, load, _, quant, hardware, _ = settings(args)
    found = auto_layout.propose(model, load, quant, hardware, args.dies)
    args.parallel, args.batch_per_die = str(found.best[0].parallel), found.best[0].load.batch
    if not args.json:
        auto_layout.show(console(args), found)
    return found


def _estimate(args: argparse.Namespace, **changes: Any) -> tuple[Any, Any]:
    from cannopy.stream_scheduler.network.report import estimate_memory, estimate_step

    chosen = settings(args, **changes)
    return _said(lambda: estimate_step(*chosen)), _said(lambda: estimate_memory(*chosen[:5]))


def _step(args: argparse.Namespace) -> int:
    step, memory = _estimate(args)
    drawn = {}
    if args.timeline:
        from cannopy.cli.estimate_timeline import draw

        drawn = {"timeline": draw(settings(args), args.target, args.timeline)}
    if args.json:
        layouts = {"layouts": args.layouts.to_dict()} if args.layouts else {}
        print_json(step_dict(args, step) | {"memory": memory.to_dict()} | layouts | drawn
                   | ({"trace": step.trace.to_dict()} if args.trace else {}))
    else:
        screen = console(args)
        estimate_view.step(screen, step, args)
        estimate_view.memory(screen, memory)
        for file in drawn.get("timeline", {}).get("files", ()):
            screen.print(f"wrote {file}", style="dim")
    return 0 if memory.fits else 1


def step_dict(args: argparse.Namespace, step: Any) -> dict[str, Any]:
    """A step estimate as plain data, times in microseconds."""
    tpot = {"accepted": args.accepted, "tpot_us": step.tpot_us(args.accepted)} if args.accepted is not None else {}
    return {
        "model": args.model, "target": args.target, "step_us": step.us, "device_us": step.trace.us,
        "host_us": step.trace.host_us, "serial_us": step.serial_us, "lower_bound_us": step.bounds.us,
        "critical_path_us": step.bounds.critical_path_us, "resources_us": dict(step.bounds.resources), **tpot,
        "bound_us": step.trace.bound_us(), "kernels": [row.to_dict() for row in step.rows],
    }


def _sweep(args: argparse.Namespace) -> int:
    from cannopy.cli.curves import curve

    name, values = _range(args.sweep)
    rows = []
    for value in values:
        step, memory = _estimate(args, **{name: value})
        per_step = 1 + (args.accepted or 0.0)
        sequences = value if name == "batch" else args.batch_per_die
        rows.append({name: value, "step_us": step.us, "tpot_us": step.us / per_step, "lower_bound_us": step.bounds.us,
                     "tokens_per_second_per_die": sequences * per_step / step.us * 1e6, "memory": memory.total,
                     "fits": memory.fits})
    if args.svg:
        args.svg.write_text(curve([(r[name], r["step_us"] / 1000) for r in rows], name, "step, ms",
                                  f"{args.model} on {args.target}", fits=[r["fits"] for r in rows]), encoding="utf-8")
    if args.json:
        print_json({"model": args.model, "target": args.target, "sweep": name, "points": rows})
    else:
        estimate_view.sweep(console(args), name, rows)
    return 0


def _range(text: str) -> tuple[str, list[int]]:
    """``batch=1..512`` as the name and 1, 2, 4, … 512."""
    name, _, span = text.partition("=")
    if name not in ("batch", "context"):
        raise CannopyError(unknown("quantity to sweep", name, ("batch", "context")))
    low, dots, high = span.partition("..")
    if not dots or not low.isdecimal() or not high.isdecimal() or not 0 < int(low) <= int(high):
        raise CannopyError(f"--sweep takes NAME=A..B with whole numbers, found {text!r}", f"--sweep {name}=1..512")
    values = [int(low)]
    while values[-1] * 2 <= int(high):
        values.append(values[-1] * 2)
    return name, values if values[-1] == int(high) else [*values, int(high)]
