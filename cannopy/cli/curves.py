"""A line chart as one self-contained SVG file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 400, 70, 50, 40, 20
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.t{font-size:15px;font-weight:600}"
    ".g{stroke:#ddd}.l{fill:none;stroke:#1769aa;stroke-width:2}.p{fill:#1769aa}.n{fill:#fff;stroke:#b3261e;stroke-width:2}"
)


def curve(points: Sequence[tuple[float, float]], x_name: str, y_name: str, title: str, *,
          fits: Sequence[bool] = ()) -> str:
    """``points`` (x, y), both above 0, on logarithmic axes. Points whose ``fits`` is False are drawn as open circles.

    ValueError without points.
    """
    if not points:
        raise ValueError("a curve needs at least one point")
    x = _Axis([p[0] for p in points], _LEFT, _WIDTH - _RIGHT)
    y = _Axis([p[1] for p in points], _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value in x.ticks():
        parts.append(f'<line class="g" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
                     f'<text x="{x(value):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{value:g}</text>')
    for value in y.ticks():
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
                     f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    parts.append(f'<polyline class="l" points="{path}"/>')
    for i, (a, b) in enumerate(points):
        good = not fits or fits[i]
        note = f"{x_name} {a:g}: {b:.2f}" + ("" if good else ", does not fit the memory")
        parts.append(f'<circle class="{"p" if good else "n"}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="4">'
                     f"<title>{html.escape(note)}</title></circle>")
    legend = "" if not fits or all(fits) else " (open circles do not fit the memory of a die)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<text class="t" x="{_LEFT}" y="22">{html.escape(title)}</text>{"".join(parts)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{html.escape(x_name + legend)}</text>'
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{html.escape(y_name)}</text>'
        "</svg>\n"
    )


class _Axis:
    """A logarithmic axis from pixel ``start`` to pixel ``end``, rounded outward to powers of two."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        found = list(values)
        self.low, self.high = math.floor(math.log2(min(found))), math.ceil(math.log2(max(found)))
        self.high += self.high == self.low
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (math.log2(value) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        step = max(1, math.ceil((self.high - self.low) / 10))
        return [2.0**i for i in range(self.low, self.high + 1, step)]
