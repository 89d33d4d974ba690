"""Rows of a prompt over the dies of attn_tp between attention and attention: sequence parallelism (TP/SP).

    all_reduce(y)  =  all_gather(reduce_scatter(y)),  f(all_gather(x))  =  all_gather(f(x))

Every rank is called with the whole prompt and attends to all of it with its heads; between one attention and the next
it has rows r · T / sp to (r + 1) · T / sp - 1. The sum behind an output projection scatters rows. They are gathered
where something needs all of them: what is cut by heads, caches, results. What reads a matrix of which each rank has
another part differs from rank to rank until it is summed, so it is computed for all rows as before.

To the cuts behind this one the dies of a group have tokens of their own: dense MLPs, experts and the embedding are
shared as by data-parallel dies, in groups of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from cannopy.fusion_rules.parallel.collectives import reduce_scatter
from cannopy.fusion_rules.parallel.heads import KIND as HEADS
from cannopy.fusion_rules.parallel.own_rows import Handler, Own, OwnRows, row_of_tokens
from cannopy.fusion_rules.parallel.shards import PART, Part
from cannopy.fusion_rules.parallel.tokens import error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import is_call, shape
from cannopy.fx_passes.parallel import ParallelError

KIND = "sp"
_ops = torch.ops._c10d_functional


def cut(work: Work) -> int:
    """Scatter the rows of every sum over attn_tp; the number of them. Raises `ParallelError` where one has no rows."""
    size, tokens = work.layout.size(KIND), row_of_tokens(work, KIND)
    if tokens % size:
        raise ParallelError(f"{KIND}={size}: {tokens} tokens cannot be divided into {size} parts: {tokens} / {size} is "
                            f"no whole number; pad the prompt to {-(-tokens // size) * size} tokens")
    return _Sequence(work, tokens).run()


class _Sequence(OwnRows):
    """``apart``: nodes of which each rank has another value, for all rows."""

    def __init__(self, work: Work, tokens: int) -> None:
        piece = Part(work.layout.position(HEADS), work.layout.size(HEADS)).of(tokens, "tokens")
        super().__init__(work, KIND, work.layout.group(HEADS), tokens, [piece])
        self.apart: set[fx.Node] = set()

    def run(self) -> int:
        """The number of sums that are scattered."""
        self.spread()
        sums = [n for n in self.editor.calls([_ops.wait_tensor.default]) if self._is_sum(n)]
        for node in sums:
            if node not in self.own:
                raise error(self.work.layout, KIND, node, f"a sum over {HEADS} of shape {list(shape(node))} has no row "
                                                          f"for each of {self.tokens} tokens")
        self.gather()
        self.editor.sweep()
        for node in sums:
            for dead in (node, cast(fx.Node, node.args[0])):  # a wait is never swept
                if not dead.users:
                    self.editor.graph.erase_node(dead)
        self.work.own.update(own for own, _ in self.own.values())
        self.work.whole.update({part: node for (node, dim), part in self._chosen.items()})
        return len(sums)

    def handlers(self) -> Mapping[Any, Handler]:
        """With the sums over attn_tp."""
        return {**super().handlers(), _ops.wait_tensor.default: self._sum}

    def follow(self, node: fx.Node) -> bool:
        """As the base; values that differ from rank to rank are left alone."""
        found = super().follow(node)
        if not self._is_sum(node) and any(n in self.apart or n.meta.get(PART) for n in node.all_input_nodes):
            self.apart.add(node)
        return found and node not in self.apart

    def may_choose(self, node: fx.Node) -> bool:
        """Also of what is computed from gathered rows, by all ranks alike."""
        return node not in self.apart and not node.meta.get(PART)

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether ``node`` waits for a sum over attn_tp, which all ranks then have."""
        return is_call(node, _ops.wait_tensor.default) and is_call(node.args[0], _ops.all_reduce.default) and (
            cast(fx.Node, node.args[0]).args[-1] == self.group.name)

    def _sum(self, node: fx.Node) -> Own | None:
        if not self._is_sum(node):
            return None
        partial = cast(fx.Node, cast(fx.Node, node.args[0]).args[0])
        size = list(shape(partial))
        dim = next((d for d, n in enumerate(size) if n == self.tokens and math.prod(size[:d]) == 1), None)
        if dim is None:
            return None
        self.read.append(partial)
        rows = self.editor.reshape(partial, [self.tokens, *size[dim + 1 :]])
        size[dim] = self.count
        return self.editor.reshape(reduce_scatter(self.editor, rows, self.group), size), dim
