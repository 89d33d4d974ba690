"""What every cut works on."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.parallel import Layout
from cannopy.fx_passes.program import Program


@dataclass(frozen=True)
class Work:
    """What a step works on. ``target`` is the product (``atlas-a3``), for the limits in contracts."""

    program: Program
    editor: Editor
    layout: Layout
    target: str
