"""The timeline as one HTML document that loads nothing from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from string import Template
from typing import Any

from cannopy.stream_scheduler.plan.model import Decision
from cannopy.stream_scheduler.simulator import Machine
from cannopy.stream_scheduler.timeline.payload import payload
from cannopy.stream_scheduler.timeline.run import Run


def render(runs: Sequence[Run], machine: Machine, *, title: str, about: Sequence[tuple[str, str]] = (),
           lower_bound_us: float | None = None, decisions: Sequence[Decision] = (), notes: Sequence[str] = ()) -> str:
    """The page.

    Args:
        runs: what to draw, one below the other on one time axis; the last one is what the tables are about.
        machine: the die that they ran on.
        title: model, size and phase.
        about: (setting, value) for the head of the page.
        lower_bound_us: device time and launches that no schedule beats, in microseconds.
        decisions: what the scheduler did and did not do.
        notes: sentences to print as they are.

    Raises:
        ValueError: no run, or a run of nothing.
    """
    if not runs or any(not run.trace.spans for run in runs):
        raise ValueError("a timeline needs at least one run with at least one kernel")
    files = resources.files(__package__)
    data = json.dumps(payload(runs, machine), separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return Template(files.joinpath("timeline.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=files.joinpath("timeline.css").read_text(encoding="utf-8"),
        script=files.joinpath("timeline.js").read_text(encoding="utf-8"),
        data=data,
        cards=_cards(runs, lower_bound_us),
        about=" · ".join(f"{html.escape(name)} <b>{html.escape(value)}</b>" for name, value in about),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in notes),
        kernels=_kernels(runs[-1]),
        decisions=_decisions(decisions),
        last=html.escape(runs[-1].name),
    )


def _cards(runs: Sequence[Run], lower_bound_us: float | None) -> str:
    first = runs[0].trace.step_us
    cards = []
    for number, run in enumerate(runs):
        change = 100 * (run.trace.step_us / first - 1) if first else 0.0
        note = "" if not number else f" ({change:+.1f} %)"
        cards.append((_us(run.trace.step_us) + note, run.name))
    if lower_bound_us is not None:
        cards.append((_us(lower_bound_us), "lower bound"))
    return "".join(f'<div class="card"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in cards)


def _us(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 10_000 else f"{value:.1f} µs"


def _kernels(run: Run) -> str:
    """Kernels by label: calls, time, share, and what bounds them."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for span in run.trace.spans.values():
        groups.setdefault((span.task.label or span.task.name, span.task.load.kernel), []).append(span)
    total = sum(span.us for group in groups.values() for span in group) or 1.0
    rows = []
    for (label, kernel), group in sorted(groups.items(), key=lambda item: -sum(s.us for s in item[1])):
        us = sum(span.us for span in group)
        bounds: dict[str, int] = {}
        for span in group:
            bounds[span.bound] = bounds.get(span.bound, 0) + 1
        most = ", ".join(name if len(bounds) == 1 else f"{name} {count}" for name, count in
                         sorted(bounds.items(), key=lambda item: -item[1]))
        rows.append((label, kernel, len(group), f"{us:.1f}", f"{us / len(group):.2f}", f"{100 * us / total:.1f}", most))
    return _table(("label", "kernel", "calls", "µs", "µs a call", "% of kernel time", "bound"), rows)


def _decisions(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return ""
    rows = [(d.feature.replace("_", " "), d.where, "yes" if d.applied else "no", _gain(d.gain_us),
             _gain(d.worst_gain_us), d.reason) for d in decisions]
    head = ("feature", "where", "applied", "gain µs", "worst of perturbed costs µs", "reason")
    return f"<section><h2>What was decided</h2>{_table(head, rows)}</section>"


def _gain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
