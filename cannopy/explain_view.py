"""An `Explanation` as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cannopy.explain import Applied, Explanation, Fate, Refused
from cannopy.report_view import ranges

_WIDTH = 10
Line = tuple[str, str]
"""A line and its rich style."""


def lines(found: Explanation, fate: Fate | None = None) -> Iterator[Line]:
    """Everything of ``found``, after what became of the node that was asked for."""
    if fate is not None:
        yield from _fate(fate)
    if found.applied:
        yield "\nApplied", "bold"
    for hit in found.applied:
        yield from _applied(hit)
    if found.refused:
        yield "\nDid not apply", "bold"
    for miss in found.refused:
        yield from _refused(miss, miss.rule in found.unmet)
    if found.absent:
        yield "\nNothing like it in this graph", "bold"
    for rule, reason in found.absent.items():
        yield f"{rule}: {reason}", "red" if rule in found.unmet else ""
    for rule in found.off:
        yield f"\n{rule} is switched off (--fusion {rule}=off)", "dim"
    for rule in found.unmet:
        yield f"\n{rule} is required (--fusion {rule}=require) and applies nowhere", "bold red"
    if not (found.applied or found.refused or found.absent or found.off):
        yield "\nNo rule was applied or came near here.", ""


def _fate(fate: Fate) -> Iterator[Line]:
    yield f"\n{fate.node}: {fate.what}", "bold"
    if fate.source:
        yield _row("source", f"{fate.source}  {fate.source_text}"), ""
    for step in fate.steps:
        yield f"  {step}", ""


def _applied(hit: Applied) -> Iterator[Line]:
    into = f" → {', '.join(hit.kernels)}" if hit.kernels else ""
    yield f"{hit.rule}{into}{_where(hit.layers, hit.places)}", "green"
    if hit.module_path:
        yield _row("module", hit.module_path), "dim"
    for i, text in enumerate(_by_file(hit.lines)):
        yield _row("source" if i == 0 else "", text), ""


def _refused(miss: Refused, required: bool) -> Iterator[Line]:
    yield f"{miss.rule}{_where(miss.layers, miss.places)}", "red" if required else "yellow"
    if miss.matched < miss.total:
        yield _row("matched", f"{miss.matched} of {miss.total} operations, stopped at {miss.node}"), ""
    else:
        yield _row("matched", f"all {miss.total} operations; refused at {miss.node}"), ""
    if miss.matched == miss.total:
        yield _row("reason", miss.reason), ""
    if miss.expected:
        yield _row("expected", miss.expected), ""
        yield _row("found", miss.found), ""
    if miss.clause:
        yield _row("contract", miss.clause), ""
    if miss.source:
        yield _row("source", f"{miss.source}  {miss.source_text}".rstrip()), ""
    if miss.remedy:
        yield _row("to match", miss.remedy), ""


def _row(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}}{text}"


def _where(layers: Sequence[int], places: int) -> str:
    where = f", {ranges(layers)}" if layers else ""
    number = f" ({places} places)" if places > max(1, len(layers)) else ""
    return where + number


def _by_file(sources: Sequence[str]) -> list[str]:
    files: dict[str, set[int]] = {}
    for line in sources:
        file, _, number = line.rpartition(":")
        files.setdefault(file, set()).add(int(number))
    return [f"{file}:{', '.join(map(str, sorted(numbers)))}" for file, numbers in files.items()]
