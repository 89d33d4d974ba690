"""Residual plots as self-contained SVG files: error in percent over measured time, one colour per file of points."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 170, 40, 50
LIMIT = 80.0
COLOURS = ("#1769aa", "#c2410c", "#15803d", "#7e22ce", "#b91c1c", "#475569")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.t{font-size:15px;font-weight:600}.g{stroke:#e2e2e2}"
    ".z{stroke:#888}.b{fill:#1769aa;opacity:.07}circle{fill-opacity:.75;stroke:#fff}"
)


@dataclass(frozen=True)
class Residual:
    """One point: measured microseconds, error as a share, what to say when the pointer is on it."""

    us: float
    error: float
    note: str


def plot(title: str, series: Mapping[str, Sequence[Residual]], band: float) -> str:
    """Points of each series; errors beyond 80 % are drawn on the edge. ``band`` shades errors up to that share."""
    times = [r.us for points in series.values() for r in points]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(us: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(us) - low) / (high - low)

    def y(percent: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (LIMIT - max(-LIMIT, min(LIMIT, percent))) / (2 * LIMIT)

    parts = [_frame(x, y, low, high, band)]
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        for r in points:
            parts.append(
                f'<circle cx="{x(r.us):.1f}" cy="{y(100 * r.error):.1f}" r="5" fill="{colour}">'
                f"<title>{html.escape(r.note)}</title></circle>"
            )
        row = TOP + 14 + 22 * i
        parts.append(
            f'<circle cx="{WIDTH - RIGHT + 22}" cy="{row - 4}" r="5" fill="{colour}"/>'
            f'<text x="{WIDTH - RIGHT + 34}" y="{row}">{html.escape(name)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f'<text class="t" x="{LEFT}" y="22">{html.escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _frame(x, y, low: int, high: int, band: float) -> str:  # type: ignore[no-untyped-def]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    top_of_band, height = y(100 * band), y(-100 * band) - y(100 * band)
    parts = [f'<rect class="b" x="{LEFT}" y="{top_of_band:.1f}" width="{right - LEFT}" height="{height:.1f}"/>']
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{10.0**power:g}</text>')
    for percent in range(-80, 81, 20):
        at = y(percent)
        style = "z" if percent == 0 else "g"
        parts.append(f'<line class="{style}" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent:+d}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">measured time, us</text>')
    parts.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">error, %</text>')
    return "".join(parts)
