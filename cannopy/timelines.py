"""Timeline pages of compiled graphs, as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cannopy.stream_scheduler import timeline
from cannopy.stream_scheduler.simulator import Machine

PREDICTED = ("Times are predicted by the cost model (docs/accuracy.md); nothing here was measured on a device.",)


def write_page(picture: Mapping[str, Any], file: Path, title: str, about: Sequence[tuple[str, str]],
               notes: Sequence[str] = PREDICTED) -> Path:
    """Write the page of ``picture`` (`timeline.payload`) to ``file``; returns its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(timeline.render(picture, title=title, about=about, notes=notes), encoding="utf-8")
    return file


def write_trace(runs: Sequence[timeline.Run], machine: Machine, file: Path) -> Path:
    """Write ``runs`` as a trace for ui.perfetto.dev to ``file``; returns its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(timeline.perfetto(runs, machine)), encoding="utf-8")
    return file
