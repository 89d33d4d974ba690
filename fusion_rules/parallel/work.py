"""What every cut works on."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.fusion_rules.engine.record import Log
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.parallel import Layout
from cannopy.fx_passes.program import Program


@dataclass(frozen=True)
class Work:
    """What a step works on. ``target`` is the product (``atlas-a3``), for the limits in contracts.

    ``experts``: how routed experts are spread, ``dispatch``, ``routing`` or ``auto`` for what the product takes.
    ``log``: what the fusions did, for the reasons of those that were not applied.
    """

    program: Program
    editor: Editor
    layout: Layout
    target: str
    experts: str = "auto"
    log: Log | None = None
