"""Which inputs of a kernel can be made to wait, so that the kernel waits with them."""

from __future__ import annotations

import torch
from torch import fx

from cannopy.fx_passes import alias, kernels
from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program

SMALL_BYTES = 1 << 16
"""Inputs up to this size may be copied so that a kernel waits; launching the copy takes longer than making it."""


class Carriers:
    """What of the inputs of kernels a wait can be put on: computed tensors, but no cache that is written in place,
    which a wait would have copied; where there is none, small arguments."""

    def __init__(self, program: Program) -> None:
        self.folded = kernels.folded(program.gm.graph)
        self.loaded = {s.name for s in program.inputs if s.kind in ("parameter", "buffer")}
        self.loaded |= {entry.name for entry in program.weights}

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of ``node`` that can wait; [] for a kernel that reads weights and caches only."""
        found = [n for n in node.all_input_nodes if self._computed(n)]
        return found or [n for n in node.all_input_nodes if self._small(n)]

    def _computed(self, node: fx.Node) -> bool:
        base = alias.base(node)
        written = any(is_call(user, aten.copy_.default) for n in {node, base} for user in n.users)
        computed = base.op == "call_function" and base not in self.folded
        return computed and not written and isinstance(node.meta.get("val"), torch.Tensor)

    def _small(self, node: fx.Node) -> bool:
        """An argument or a counter, of which a copy costs nothing; no weight."""
        value, base = node.meta.get("val"), alias.base(node)
        if not isinstance(value, torch.Tensor) or base.op != "placeholder" or base.name in self.loaded:
            return False
        return value.numel() * value.dtype.itemsize <= SMALL_BYTES


def cannot_wait(program: Program) -> frozenset[str]:
    """Names of the calls in the graph of ``program`` that no wait can hold back."""
    carriers = Carriers(program)
    calls = [n for n in program.gm.graph.nodes if n.op == "call_function" and n not in carriers.folded]
    return frozenset(n.name for n in calls if not carriers.of(n))
