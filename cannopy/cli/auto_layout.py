"""``--parallel auto``: layouts of a number of dies that fit, and the fastest of them by the cost model."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from cannopy.cli.common import positive
from cannopy.cli.world import AUTO
from cannopy.errors import CannopyError

if TYPE_CHECKING:
    from rich.console import Console

    from cannopy.frontend.sources import LoadedModel
    from cannopy.stream_scheduler.network.layouts import Proposals

def add_dies_argument(group: Any) -> None:
    """``--dies``."""
    group.add_argument("--dies", type=positive, metavar="N", help="with --parallel auto: dies to spread the model over")


def check(args: argparse.Namespace) -> None:
    """`CannopyError` when ``--dies`` and ``--parallel auto`` are not both there."""
    if (getattr(args, "parallel", None) == AUTO) != (args.dies is not None):
        raise CannopyError("--parallel auto chooses a layout of --dies N", "give both, or the sizes of a layout")


def of_world(args: argparse.Namespace, loaded: LoadedModel) -> Proposals:
    """Layouts of as many dies as torchrun has started ranks; every rank finds the same."""
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal():
        raise CannopyError("--parallel auto spreads a run over the ranks of torchrun, and this process is alone",
                           "torchrun --nproc-per-node N -m cannopy run …")
    dies, phase = int(world), "decode" if args.phase == "both" else args.phase
    return for_graph(argparse.Namespace(**{**vars(args), "dies": dies, "phase": phase}), loaded)


def propose(model: Any, load: Any, quant: Any, hardware: Any, dies: int) -> Proposals:
    """Layouts of a described model; `CannopyError` with the reasons when none fits."""
    from cannopy.stream_scheduler.network import layouts

    try:
        return layouts.propose(model, dies, load, quant, hardware)
    except ValueError as error:
        raise CannopyError(str(error), "more dies, fewer sequences or a shorter context") from None


def for_graph(args: argparse.Namespace, loaded: LoadedModel) -> Proposals:
    """Layouts for the call that ``cannopy compile`` would make of ``loaded``."""
    from cannopy.stream_scheduler.hardware import load_hardware
    from cannopy.stream_scheduler.network.model import load_model, model_names
    from cannopy.stream_scheduler.network.published import described
    from cannopy.stream_scheduler.network.setting import Load, Quantisation

    config: Any = getattr(loaded.model, "config", None)
    if config is None or loaded.case is None:
        raise CannopyError(f"{loaded.name}: no cost model knows its layers", "give --parallel the sizes of a layout")
    try:
        known = args.size == "full" and args.model in model_names()
        plain = config.to_dict() if hasattr(config, "to_dict") else dataclasses.asdict(config)
        model = load_model(args.model) if known else described(plain, loaded.name)
        tokens = loaded.case.prefill_tokens if args.phase == "prefill" else loaded.case.max_cache_len
        load = Load(args.phase, args.batch, tokens, 0)
        return propose(model, load, Quantisation(), load_hardware(args.target), args.dies)
    except ValueError as error:
        raise CannopyError(str(error)) from None


def show(screen: Console, found: Proposals) -> None:
    """The first layouts with time and memory, and why the others are not among them."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("layout", "step, ms", "memory, GB", "bound by"):
        table.add_column(column, overflow="fold", justify="left" if column in ("layout", "bound by") else "right")
    for one in found.best:
        table.add_row(str(one.parallel), f"{one.us / 1000:.2f}", f"{one.memory.total / 1e9:.1f}", one.bound)
    screen.print(table)
    reasons = "; ".join(f"{n} {reason}" for reason, n in sorted(found.dropped.items(), key=lambda r: -r[1])[:3])
    screen.print(f"first of {found.legal} legal layouts by predicted time on one stream is taken"
                 + (f"; left out: {reasons}" if reasons else ""))
