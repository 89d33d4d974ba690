"""Small inline SVG charts; colours come from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from cannopy.parity.measure import MEDIAN_LIMIT, P90_LIMIT, ErrorParity

_ROW = 22
_LABEL = 230
_WIDTH = 760


def bars(counts: Sequence[tuple[str, int]]) -> str:
    """One horizontal bar per name."""
    if not counts:
        return "<p>none</p>"
    largest = max(count for _, count in counts)
    rows = []
    for i, (name, count) in enumerate(counts):
        y = i * _ROW
        width = max(2.0, (_WIDTH - _LABEL - 50) * count / largest)
        rows.append(
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect class="ours" x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="15" rx="2"/>'
            f'<text class="value" x="{_LABEL + width + 6:.1f}" y="{y + 15}">{count}</text>'
        )
    return _svg(len(counts) * _ROW, "Device kernels by type", "".join(rows))


def errors(parts: Sequence[ErrorParity], plain_run: str) -> str:
    """Median and 90th percentile of the compiled run and of ``plain_run`` on a log scale, with the limit as a tick."""
    rows = [
        (f"{part.phase}, {label}", getattr(part.compiled, name), getattr(part.plain, name), limit)
        for part in parts
        for name, label, limit in (("median", "median", MEDIAN_LIMIT), ("p90", "90th percentile", P90_LIMIT))
    ]
    values = [v for _, ours, plain, limit in rows for v in (ours, plain, plain * limit) if 0 < v < math.inf]
    if not values:
        return "<p>Both runs equal float64.</p>"
    low, high = math.log10(min(values)) - 0.15, math.log10(max(values)) + 0.05

    def position(value: float) -> float:
        share = (math.log10(value) - low) / (high - low) if 0 < value < math.inf else (0.0 if value == 0 else 1.0)
        return _LABEL + (_WIDTH - _LABEL - 90) * share

    drawn = []
    for i, (label, ours, plain, limit) in enumerate(rows):
        y = i * 46
        tick = position(plain * limit)
        drawn.append(
            f'<text x="{_LABEL - 8}" y="{y + 24}" text-anchor="end">{html.escape(label)}</text>'
            + _bar("ours", y + 6, position(ours), f"{ours:.2e}")
            + _bar("plain", y + 22, position(plain), f"{plain:.2e}")
            + f'<line class="limit" x1="{tick:.1f}" x2="{tick:.1f}" y1="{y + 2}" y2="{y + 38}"/>'
        )
    legend = (
        f'<p class="legend"><i class="ours"></i> compiled <i class="plain"></i> {html.escape(plain_run)} '
        '<i class="limit"></i> limit for the compiled run (log scale)</p>'
    )
    return legend + _svg(len(rows) * 46, "Relative error per token against float64", "".join(drawn))


def _bar(kind: str, y: int, end: float, label: str) -> str:
    return (
        f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{max(1.0, end - _LABEL):.1f}" height="13" rx="2"/>'
        f'<text class="value" x="{_WIDTH - 80}" y="{y + 11}">{label}</text>'
    )


def _svg(height: int, label: str, content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(label)}">{content}</svg>'
