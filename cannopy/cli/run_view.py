"""What `cannopy run` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cannopy.parity.measure import LARGEST_LIMIT, MEDIAN_LIMIT, P90_LIMIT, Errors, ParityReport
from cannopy.report_view import counts_table, fusions_table, headline, kernels_table, misses_table, seconds_table
from cannopy.trial import Trial


def show(screen: Console, trial: Trial) -> None:
    """Print a trial: per phase what was compiled, then parity, times and the verdict."""
    for phase, report in trial.reports.items():
        screen.print(f"\n[bold]{phase}[/]: {escape(headline(report))}")
        for title, table in (
            ("fused", fusions_table(report)),
            ("came near and did not fuse", misses_table(report.misses)),
            ("device kernels per layer", kernels_table(report)),
            ("device kernels as torchair submits them", counts_table("kernel", report.kernels)),
        ):
            if table.row_count:
                screen.print(f"\n{title}", style="dim")
                screen.print(table)
    if trial.parity is not None:
        _show_parity(screen, trial.parity)
    screen.print("\n[bold]seconds[/] (on a host they say nothing about a device)")
    screen.print(seconds_table(trial.seconds))
    _show_verdict(screen, trial)


def show_ranks(screen: Console, ranks: Sequence[Mapping[str, Any]]) -> None:
    """A line per rank: errors as multiples of the plain run's, what its cache had, and the verdict."""
    table = _numbers("rank", "phase", "median", "p90", "largest", "cache", "verdict")
    for rank, found in enumerate(ranks):
        for i, (phase, ratios) in enumerate(found["error_ratios"].items()):
            table.add_row(
                str(rank) if not i else "", phase, *(f"{r:.2f}" for r in ratios),
                found["cache"].get(phase.partition(" ")[0], ""),
                "" if i else "[green]holds[/]" if found["passed"] else "[red]fails[/]",
            )
    screen.print("\n[bold]ranks[/]: errors as multiples of the plain run's, each on its own requests")
    screen.print(table)
    for rank, found in enumerate(ranks):
        for sentence in found["failures"]:
            screen.print(f"[red]rank {rank}: {escape(sentence)}[/]")


def _show_parity(screen: Console, parity: ParityReport) -> None:
    screen.print("\n[bold]parity[/]: relative error per token against float64")
    table = _numbers("phase", "tokens", "run", "median", "p90", "largest")
    for part in parity.errors:
        ours, plain = part.compiled, part.plain
        table.add_row(part.phase, str(ours.tokens), "compiled", *_errors(ours))
        table.add_row("", "", parity.plain, *_errors(plain))
        pairs = ((ours.median, plain.median, MEDIAN_LIMIT), (ours.p90, plain.p90, P90_LIMIT),
                 (ours.largest, plain.largest, LARGEST_LIMIT))
        table.add_row("", "", "ratio", *(_ratio(*pair) for pair in pairs))
    screen.print(table)
    if parity.picks:
        table = _numbers("phase", "picks of", "made", f"unlike {parity.plain}", "worst tie (1 = limit)", "invalid")
        for picks in parity.picks:
            table.add_row(
                picks.phase, picks.kind, str(picks.tokens), str(picks.differ), f"{picks.worst:.2f}", str(picks.invalid)
            )
        screen.print()
        screen.print(table)
    if parity.writes:
        table = _numbers("phase", "cache", "rows written", "rows outside the step", "of them changed")
        for cache in parity.writes:
            table.add_row(cache.phase, cache.name, str(cache.rows), str(cache.outside), str(cache.changed))
        screen.print()
        screen.print(table)
    for note in parity.notes:
        screen.print(note, style="dim")


def _show_verdict(screen: Console, trial: Trial) -> None:
    if trial.same_tokens is not None:
        total = sum(len(row) for row in trial.tokens)
        plain = trial.parity.plain if trial.parity else "the plain run"
        screen.print(f"\ngreedy tokens: {trial.same_tokens} of {total} are those of {plain} on the same picks")
    failures = trial.parity.failures if trial.parity else ["parity was not measured"]
    for sentence in failures:
        screen.print(f"[red]{escape(sentence)}[/]")
    screen.print("[bold green]parity holds[/]" if not failures else "[bold red]parity fails[/]")


def _errors(errors: Errors) -> tuple[str, str, str]:
    return f"{errors.median:.2e}", f"{errors.p90:.2e}", f"{errors.largest:.2e}"


def _ratio(ours: float, plain: float, limit: float) -> str:
    ratio = ours / plain if plain else float("inf") if ours else 1.0
    colour = "green" if ratio <= limit else "red"
    return f"[{colour}]{ratio:.2f}[/] of {limit}"


def _numbers(*columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table
