"""The timeline as one HTML document that loads nothing from anywhere."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any


def render(data: Mapping[str, Any], *, title: str, about: Sequence[tuple[str, str]] = (),
           notes: Sequence[str] = ()) -> str:
    """The page.

    Args:
        data: what `payload` made, or JSON gave back; its last run is what the tables are about.
        title: model, size and phase.
        about: (setting, value) for the head of the page.
        notes: sentences to print as they are.
    """
    files = resources.files(__package__)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    return Template(files.joinpath("timeline.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=files.joinpath("timeline.css").read_text(encoding="utf-8"),
        script=files.joinpath("timeline.js").read_text(encoding="utf-8"),
        data=text,
        cards=_cards(data),
        about=" · ".join(f"{html.escape(name)} <b>{html.escape(value)}</b>" for name, value in about),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in notes),
        kernels=_kernels(data),
        decisions=_decisions(data["decisions"]),
        last=html.escape(data["runs"][-1]["name"]),
    )


def _cards(data: Mapping[str, Any]) -> str:
    times = [(run["name"], run["us"] + run["host_us"]) for run in data["runs"]]
    first = times[0][1]
    cards = []
    for number, (name, us) in enumerate(times):
        change = 100 * (us / first - 1) if first else 0.0
        cards.append((_us(us) + (f" ({change:+.1f} %)" if number else ""), name))
    if data["lower_bound_us"] is not None:
        cards.append((_us(data["lower_bound_us"]), "lower bound"))
    return "".join(f'<div class="card"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in cards)


def _us(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 10_000 else f"{value:.1f} µs"


def _kernels(data: Mapping[str, Any]) -> str:
    """Kernels of the last run by label: calls, time, share, and what bounds them."""
    groups: dict[tuple[int, int], list[Any]] = {}
    for kernel in data["runs"][-1]["kernels"]:
        groups.setdefault((kernel[1], kernel[2]), []).append(kernel)
    times = {key: sum(k[5] - k[4] for k in group) for key, group in groups.items()}
    total = sum(times.values()) or 1.0
    rows = []
    for key, group in sorted(groups.items(), key=lambda item: -times[item[0]]):
        us, bounds = times[key], Counter(data["bounds"][k[6]] for k in group)
        most = ", ".join(name if len(bounds) == 1 else f"{name} {count}" for name, count in bounds.most_common())
        rows.append((data["texts"][key[0]], data["texts"][key[1]], len(group), f"{us:.1f}", f"{us / len(group):.2f}",
                     f"{100 * us / total:.1f}", most))
    return _table(("label", "kernel", "calls", "µs", "µs a call", "% of kernel time", "bound"), rows)


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> str:
    if not decisions:
        return ""
    rows = [(d["feature"].replace("_", " "), d["where"], "yes" if d["applied"] else "no", _gain(d["gain_us"]),
             _gain(d["worst_gain_us"]), d["reason"]) for d in decisions]
    head = ("feature", "where", "applied", "gain µs", "worst of perturbed costs µs", "reason")
    return f"<section><h2>What was decided</h2>{_table(head, rows)}</section>"


def _gain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
