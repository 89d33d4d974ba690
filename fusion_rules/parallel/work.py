"""What every cut works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from cannopy.fusion_rules.engine.record import Log
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.parallel import Layout
from cannopy.fx_passes.program import Program


@dataclass(frozen=True)
class Work:
    """What a step works on. ``target`` is the product (``atlas-a3``), for the limits in contracts.

    ``experts``: how routed experts are spread, ``dispatch``, ``routing`` or ``auto`` for what the product takes.
    ``log``: what the fusions did, for the reasons of those that were not applied. ``own``: nodes with rows of this rank
    alone in a group of attn_tp (`sequence`); ``whole``: what some of them were taken out of, which all ranks have.
    """

    program: Program
    editor: Editor
    layout: Layout
    target: str
    experts: str = "auto"
    log: Log | None = None
    own: set[fx.Node] = field(default_factory=set)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
