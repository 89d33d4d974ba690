"""Routed experts of a prompt over dies without dispatch: routed twice, by die and then by expert, all sizes static.

    x, ids  →  copies sorted by expert (init_routing, counts)        T·K rows
            →  C rows to each die, the first ones its own            all_to_all of counts and of ep·C rows
            →  rows by expert, the padding behind them (re_routing)
            →  grouped matmuls  →  rows by die  →  all_to_all back
            →  weighted sum of each token's rows (finalize_routing)

C = T·min(K, E / ep) is every row that one die can send to another, so nothing is dropped and the host is not asked.
The padding of each die counts as one more expert, whose rows re_routing puts last: its sizes must cover all rows. Rows
of padding hold copies of other tokens and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_to_all
from cannopy.fusion_rules.parallel.mixtures import Mixture, mlp, npu
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fusion_rules.rewrite.expert_calls import DROPPED
from cannopy.fx_passes.graph import Editor, aten, shape
from cannopy.fx_passes.parallel import ROUTED_EP

Tokens = tuple[fx.Node, fx.Node, fx.Node]
"""x [T, H], ids int32 [T, K], scales [T, K]."""


def routed(work: Work, m: Mixture, tokens: Tokens, weights: tuple[fx.Node, fx.Node], chunks: Sequence[int]) -> fx.Node:
    """[T, H]: the weighted sum over the chosen experts, without what is added to it; ``chunks`` of tokens in turn."""
    parts, begin = [], 0
    for size in chunks:
        x, ids, scales = tokens if len(chunks) == 1 else (
            work.editor.call(aten.slice.Tensor, n, 0, begin, begin + size) for n in tokens)
        parts.append(_Chunk(work, m, x, ids, scales).run(weights))
        begin += size
    return parts[0] if len(parts) == 1 else work.editor.call(aten.cat.default, parts, 0)


class _Chunk:
    """One chunk of tokens: ``each`` rows per token are kept for every die, ``room`` in all."""

    def __init__(self, work: Work, m: Mixture, x: fx.Node, ids: fx.Node, scales: fx.Node) -> None:
        self.work, self.m, self.x, self.ids, self.scales = work, m, x, ids, scales
        self.group = work.layout.group(ROUTED_EP)
        self.local = m.experts // self.group.size
        (self.tokens, self.top_k), self.hidden = shape(ids), shape(x)[1]
        self.each = min(self.top_k, self.local) if m.distinct else self.top_k
        self.room = self.each * self.tokens

    @property
    def editor(self) -> Editor:
        """Of the graph."""
        return self.work.editor

    def run(self, weights: tuple[fx.Node, fx.Node]) -> fx.Node:
        """The chunk's sums [T, H]."""
        editor, size = self.editor, self.group.size
        sent = editor.call(
            npu("npu_moe_init_routing_v2"), self.x, self.ids, active_num=self.tokens * self.top_k,
            expert_num=self.m.choices, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1,
            active_expert_range=[0, self.m.experts], row_idx_type=0,
        )
        copies, row_of_pair, counts = (editor.item(sent, i) for i in range(3))
        first = self._first_rows(counts)
        came = editor.reshape(all_to_all(editor, counts, self.group), [size, self.local])
        rows = all_to_all(editor, self._by_die(copies, first), self.group)
        by_expert = editor.call(npu("npu_moe_re_routing"), rows, self._with_padding(came))
        each = editor.call(aten.slice.Tensor, editor.item(by_expert, 3), 0, 0, self.local)
        out = mlp(self.work, self.m, editor.item(by_expert, 0), weights, each)
        order = editor.call(aten._to_copy.default, editor.item(by_expert, 2), dtype=torch.float32)
        inverse = editor.item(editor.call(aten.sort.default, order), 1)  # exact: less than 2^24 rows
        back = all_to_all(editor, editor.call(aten.index_select.default, out, 0, inverse), self.group)
        # As [experts, rows each, H], which the mode with -1 for no row asks for.
        back = editor.reshape(back, [size * self.each, self.tokens, self.hidden])
        return editor.call(npu("npu_moe_finalize_routing"), back, None, None, None, self.scales,
                           self._rows_of_pairs(row_of_pair, first), None, drop_pad_mode=DROPPED)

    def _first_rows(self, counts: fx.Node) -> fx.Node:
        """int64 [ep]: where the copies for each die begin, from counts int64 [E]."""
        editor = self.editor
        per_die = editor.call(aten.sum.dim_IntList, editor.reshape(counts, [self.group.size, self.local]), [1])
        return editor.call(aten.sub.Tensor, editor.call(aten.cumsum.default, per_die, 0), per_die)

    def _by_die(self, copies: fx.Node, first: fx.Node) -> fx.Node:
        """[ep · C, H]: the copies for die 0 and padding, those for die 1, …"""
        editor, size = self.editor, self.group.size
        number = editor.call(aten.arange.default, self.room, dtype=torch.int64, device=torch.device("cpu"))
        at = editor.call(aten.add.Tensor, editor.reshape(first, [size, 1]), number)
        last = editor.call(aten.clamp.default, at, None, self.tokens * self.top_k - 1)
        return editor.call(aten.index_select.default, copies, 0, editor.reshape(last, [size * self.room]))

    def _with_padding(self, came: fx.Node) -> fx.Node:
        """int64 [ep, E / ep + 1]: rows that came from each die by expert, then those of padding."""
        editor = self.editor
        used = editor.call(aten.sum.dim_IntList, came, [1], True)
        return editor.call(aten.cat.default, [came, editor.call(aten.rsub.Scalar, used, self.room)], 1)

    def _rows_of_pairs(self, row_of_pair: fx.Node, first: fx.Node) -> fx.Node:
        """int32 [T · K]: the row of what came back, -1 for a zero expert, from the row among the sorted copies."""
        editor, size = self.editor, self.group.size
        number = editor.call(aten.arange.start_step, 0, size * self.room, self.room, dtype=torch.int64,
                             device=torch.device("cpu"))
        moved = editor.call(aten._to_copy.default, editor.call(aten.sub.Tensor, number, first), dtype=torch.int32)
        die = editor.call(aten.floor_divide.default, editor.reshape(self.ids, [self.tokens * self.top_k]), self.local)
        if self.m.choices > self.m.experts:
            die = editor.call(aten.clamp.default, die, None, size - 1)
        row = editor.call(aten.add.Tensor, row_of_pair, editor.call(aten.index_select.default, moved, 0, die))
        if self.m.choices == self.m.experts:
            return row
        return editor.call(aten.masked_fill.Scalar, row, editor.call(aten.lt.Scalar, row_of_pair, 0), -1)
