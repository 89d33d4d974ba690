"""The stage ``parallel``: a fused graph for one die  →  the graph of one rank of a layout.

Each step makes one kind of cut wherever it belongs and gives the number of places. A cut that was asked for and has no
place, or cannot be made, is a `ParallelError`: nothing is left whole in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.parallel import context, dense, experts, heads, kvp, moe_tp, o_proj, sequence, vocabulary
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import Editor
from cannopy.fx_passes.parallel import LAYOUT, Layout, ParallelError
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_layout import drop_unread

__all__ = ["CUTS", "Step", "Work", "run", "steps"]

CUTS = "cuts"
"""Key of `Program.facts`: places that each kind of cut was made at, before layers are stamped out."""


Step = Callable[[Work], int]
"""Makes one kind of cut; the number of places."""


def steps() -> Mapping[str, Step]:
    """Each kind of cut by the group that it belongs to, in the order in which they are made."""
    return MappingProxyType({
        context.KIND: context.cut,
        kvp.KIND: kvp.cut,
        o_proj.KIND: o_proj.cut,
        heads.KIND: heads.cut,
        sequence.KIND: sequence.cut,
        dense.KIND: dense.cut,
        vocabulary.EMBEDDING: vocabulary.cut_embedding,
        vocabulary.HEAD: vocabulary.cut_head,
        moe_tp.KIND: moe_tp.cut,
        experts.KIND: experts.cut,
    })


def run(program: Program, target: str, way_of_experts: str = experts.AUTO, log: Log | None = None,
        decode: bool = False) -> int:
    """Cut ``program`` for the rank of its layout in place; the number of places, 0 where there is no layout.

    ``way_of_experts``: one of `experts.WAYS`. ``log``: what the fusions did, for the errors. ``decode``: the graph is a
    step of decode, for which sp means nothing.

    Raises:
        ParallelError: a cut that the layout asks for cannot be made; names the node and its source line.
    """
    layout: Layout | None = program.facts.get(LAYOUT)
    if layout is None or layout.parallel.dies == 1:
        return 0
    if way_of_experts != experts.AUTO and layout.size(experts.KIND) == 1:
        raise ParallelError(f"experts={way_of_experts} is asked for, but {layout.parallel} spreads no experts: give ep")
    if decode:
        layout = replace(layout, parallel=replace(layout.parallel, sp=1))
    work = Work(program, Editor(program.gm), layout, target, way_of_experts, log)
    cuts: dict[str, int] = {}
    for kind, step in steps().items():
        if layout.size(kind) > 1:
            cuts[kind] = step(work)
            work.editor.sweep()  # the next kind must not find what this one has replaced
            if not cuts[kind]:
                raise ParallelError(f"{kind}={layout.size(kind)} finds nothing to cut in this graph; leave {kind} out")
    drop_unread(program, work.editor)
    program.facts[CUTS] = cuts
    return sum(cuts.values())
