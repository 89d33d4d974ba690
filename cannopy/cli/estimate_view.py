"""Tables of `cannopy estimate` for a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cannopy.stream_scheduler.cost import Estimate
    from cannopy.stream_scheduler.network.memory import Memory
    from cannopy.stream_scheduler.network.report import StepEstimate

WAITS = ("event", "cores")
"""What a stream waits for while others work."""


def step(screen: Console, found: StepEstimate, args: argparse.Namespace) -> None:
    """Times, the table of kernels, and what bounds the step."""
    screen.print(f"[bold]{args.model}[/] on {args.target}: step [bold]{_us(found.us)}[/] "
                 f"({_us(found.trace.us)} on the device, {_us(found.trace.host_us)} of graph launches)")
    screen.print(f"one stream without prefetch and SuperKernel {_us(found.serial_us)}; no schedule of these kernels "
                 f"takes less than {_us(found.bounds.us)} ({found.bounds.bound})")
    if found.us > found.serial_us:
        screen.print(f"[yellow]this plan is slower than one stream here, by {_us(found.us - found.serial_us)}[/]")
    if args.accepted is not None:
        tpot = _us(found.tpot_us(args.accepted))
        screen.print(f"{args.accepted:g} drafts accepted per step: {tpot} per output token")
    elif getattr(args, "next_n", 0):
        screen.print(f"per output token: {_us(found.tpot_us(args.next_n))} with all drafts accepted, {_us(found.us)} "
                     "with none (--accepted)")
    table = _table("kernel for", "kernel", "calls", "time", "share", "bytes", "FLOP", "bound")
    for row in found.rows[: args.top]:
        table.add_row(row.label, row.kernel, str(row.count), _us(row.us), f"{row.share:.1%}", _amount(row.bytes, "B"),
                      _amount(row.flops, ""), row.bound)
    screen.print(table)
    if len(found.rows) > args.top:
        rest = found.rows[args.top:]
        screen.print(f"and {len(rest)} more, {_us(sum(row.us for row in rest))} (--top)")
    busy = {name: us for name, us in found.trace.bound_us().items() if name not in WAITS}
    total = sum(busy.values()) or 1.0
    screen.print("kernels and the gaps before them by bound: "
                 + ", ".join(f"{name} {us / total:.0%}" for name, us in busy.items()))


def memory(screen: Console, found: Memory) -> None:
    """One line per purpose, and whether it fits."""
    parts = ", ".join(f"{name} {_amount(value, 'B')}" for name, value in found.to_dict().items()
                      if name in ("weights", "caches", "buffers", "activations", "reserved"))
    verdict = "[green]fits[/]" if found.fits else "[red]does not fit[/]"
    screen.print(f"memory per die: {parts}; together {_amount(found.total, 'B')} of "
                 f"{_amount(found.capacity, 'B')}, {verdict}")


def kernel(screen: Console, found: Estimate) -> None:
    """One kernel: time, what it moves and computes, time per resource."""
    work = found.work
    screen.print(f"[bold]{work.kernel.name}[/] {_us(found.us)}, bound by {found.bound}, on {found.cube_cores} cube and "
                 f"{found.vector_cores} vector cores")
    screen.print(f"{_amount(work.bytes, 'B')} ({_amount(work.weight_bytes, 'B')} weights, "
                 f"{_amount(work.cache_bytes, 'B')} cache), {_amount(work.macs, 'MAC')}")
    screen.print("per resource: " + ", ".join(f"{name} {_us(us)}" for name, us in found.parts.items() if us))


def sweep(screen: Console, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per point."""
    table = _table(name, "step", "lower bound", "per output token", "tokens/s per die", "memory", "fits")
    for row in rows:
        table.add_row(str(row[name]), _us(row["step_us"]), _us(row["lower_bound_us"]), _us(row["tpot_us"]),
                      f"{row['tokens_per_second_per_die']:.0f}", _amount(row["memory"], "B"),
                      "yes" if row["fits"] else "no")
    screen.print(table)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column in ("kernel", "bound", "fits") else "right")
    return table


def _us(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.1f} us"


def _amount(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
