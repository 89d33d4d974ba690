"""The report of a trial as files: report.json and a self-contained index.html without any network resource."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from cannopy.page import charts
from cannopy.parity.measure import LARGEST_LIMIT, MEDIAN_LIMIT, P90_LIMIT, ParityReport
from cannopy.report import CompileReport
from cannopy.report_view import fusion_rows, grouped_misses, headline, kernel_rows
from cannopy.timelines import write_page
from cannopy.trial import Trial


def write_report(trial: Trial, folder: Path) -> list[Path]:
    """Write ``report.json``, ``index.html`` and a ``timeline-PHASE.html`` for each phase that was planned into
    ``folder``, which is made if absent; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / "report.json", folder / "index.html"
    data.write_text(json.dumps(trial.to_dict(), indent=2) + "\n", encoding="utf-8")
    page.write_text(render(trial), encoding="utf-8")
    about = [("target", str(trial.settings.get("target", "?"))), ("batch", str(trial.settings.get("batch", "?")))]
    return [data, page, *(write_page(picture, folder / f"timeline-{phase}.html", f"{trial.model}: {phase}", about)
                          for phase, picture in trial.timelines.items())]


def render(trial: Trial) -> str:
    """The page as one HTML document."""
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    sections = [_summary(trial)]
    for phase, report in trial.reports.items():
        sections.append(_phase(phase, report, phase in trial.timelines))
    if trial.parity is not None:
        sections.append(_parity(trial.parity))
    sections.append(_timings(trial))
    return template.substitute(
        title=html.escape(f"{trial.model}: cannopy run"), style=style, body="\n".join(sections), footer=_footer(trial)
    )


def _summary(trial: Trial) -> str:
    verdict = "parity holds" if trial.passed else "parity fails"
    failures = trial.parity.failures if trial.parity else ["parity was not measured"]
    settings = {k.replace("_", " "): _plain(v) for k, v in trial.settings.items()}
    cards = []
    for phase, report in trial.reports.items():
        nodes = report.nodes
        cards.append(_card(f"{phase}: ATen nodes captured", nodes.get("captured", "?")))
        cards.append(_card(f"{phase}: device kernels", sum(report.kernels.values()) or "?"))
        copies = "?" if report.cache_copies is None else report.cache_copies
        cards.append(_card(f"{phase}: full-cache copies", copies))
    device = next((r.device for r in trial.reports.values()), "host")
    where = "on the host engine (CPU), not on a device" if device == "host" else "on an NPU"
    return f"""
<header>
  <p class="verdict {"good" if trial.passed else "bad"}">{verdict}</p>
  <h1>{html.escape(trial.model)}</h1>
  <p>Compiled for {html.escape(str(trial.settings.get("target", "?")))} and run {where}.
  {html.escape(" ".join(trial.notes))}</p>
  {_list(failures, "failures")}
  <div class="cards">{"".join(cards)}</div>
  {_table(("setting", "value"), settings.items())}
</header>"""


def _phase(phase: str, report: CompileReport, drawn: bool) -> str:
    kinds, rows = fusion_rows(report)
    fusions = _table(("rule", *kinds, "total"), rows, numbers=True)
    misses = grouped_misses(report.misses)
    missed = _table(("rule", "layers", "reason", "where"), misses, pre=True) if misses else "<p>none</p>"
    layers, kernels = kernel_rows(report)
    ge_kernels = sorted(report.kernels.items(), key=lambda item: (-item[1], item[0]))
    return f"""
<section>
  <h2>{html.escape(phase)}</h2>
  <p>{html.escape(headline(report)).replace(chr(10), "<br>")}</p>
  {f'<p><a href="timeline-{html.escape(phase)}.html">timeline of the plan</a></p>' if drawn else ""}
  <h3>Fusions by layer</h3>
  {fusions}
  <h3>Came near and did not fuse</h3>
  {missed}
  <h3>Device kernels by layer</h3>
  {_table(("kernel", *layers, "total"), kernels, numbers=True)}
  <h3>Device kernels that torchair submitted</h3>
  {charts.bars(ge_kernels)}
</section>"""


def _parity(parity: ParityReport) -> str:
    picks = ""
    if parity.picks:
        columns = ("phase", "picks of", "made", f"unlike {parity.plain}", "worst tie (1 = limit)", "invalid")
        made = [(p.phase, p.kind, p.tokens, p.differ, f"{p.worst:.2f}", p.invalid) for p in parity.picks]
        picks = f"<h3>Picks of experts and keys</h3>{_table(columns, made, numbers=True)}"
    writes = ""
    if parity.writes:
        titles = ("phase", "cache", "rows written", "rows outside the step", "of them changed")
        kept = [(w.phase, w.name, w.rows, w.outside, w.changed) for w in parity.writes]
        writes = f"<h3>Rows of the cache</h3>{_table(titles, kept, numbers=True)}"
    plain = parity.plain
    head = ("phase", "tokens", "median", plain, "p90", plain, "largest", plain)
    rows: list[tuple[Any, ...]] = []
    for part in parity.errors:
        pairs = [
            f"{getattr(run, name):.2e}" for name in ("median", "p90", "largest") for run in (part.compiled, part.plain)
        ]
        rows.append((part.phase, part.compiled.tokens, *pairs))
    return f"""
<section>
  <h2>Parity</h2>
  <p>Relative error per token against float64, with the picks of the compiled run replayed in the other two runs.
  Limits: {MEDIAN_LIMIT} times {plain} in the median, {P90_LIMIT} times at the 90th percentile,
  {LARGEST_LIMIT:g} times the largest.</p>
  {charts.errors(parity.errors, plain)}
  {_table(head, rows, numbers=True)}
  {picks}
  {writes}
  {_list(parity.notes, "notes")}
</section>"""


def _timings(trial: Trial) -> str:
    rows = [(name.replace("_", " "), f"{seconds:.3f}") for name, seconds in trial.seconds.items()]
    steps = "".join(
        f"<h3>Compiling {html.escape(phase)}</h3>"
        + _table(("step", "seconds"), [(k, f"{v:.3f}") for k, v in report.timings.items()], numbers=True)
        for phase, report in trial.reports.items()
    )
    return f"""
<section>
  <h2>Seconds</h2>
  <p>Wall time of this run. On a host, kernels are plain PyTorch on the CPU: these times say nothing about a device.</p>
  {_table(("what", "seconds"), rows, numbers=True)}
  {steps}
</section>"""


def _footer(trial: Trial) -> str:
    versions = next((r.versions for r in trial.reports.values()), {})
    return html.escape(", ".join(f"{name} {version}" for name, version in versions.items()))


def _card(label: str, value: Any) -> str:
    return f'<div class="card"><b>{html.escape(str(value))}</b><span>{html.escape(label)}</span></div>'


def _list(items: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{html.escape(i)}</li>" for i in items)}</ul>' if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: bool = False, pre: bool = False) -> str:
    kind = " ".join(name for name, on in (("numbers", numbers), ("pre", pre)) if on)
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
