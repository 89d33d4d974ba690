"""A prompt over the dies of cp: each has two segments of the tokens, attends to all keys before, and gathers the rest.

    f(x)  →  all_gather(f(x[own])) in order,  own = segments r and 2·cp - 1 - r of 2·cp (as many keys for every rank)
    attention(q, k, lengths)  →  attention(q[a:b], k[:b], ends clamped to [a, b]) for each of both segments

Every rank is called with the whole prompt. Operations that know tokens apart run on own rows; what needs them all
(caches, keys, results) reads gathered rows, so caches are written in full by every rank. An attention that cannot be
split by tokens is a `ParallelError`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.heads import FUSED, PROLOG, SPARSE
from cannopy.fusion_rules.parallel.own_rows import Handler, Own, OwnRows, row_of_tokens
from cannopy.fusion_rules.parallel.places import ATTENTION
from cannopy.fusion_rules.parallel.shards import Piece
from cannopy.fusion_rules.parallel.tokens import error, legal
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, operator_named, shape
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.weight_plan import derived

KIND = "cp"
INDEXER = "npu::npu_lightning_indexer"


def cut(work: Work) -> int:
    """Split the prompt; the number of attentions. Raises `ParallelError` where one cannot be split."""
    size = work.layout.size(KIND)
    if size != work.layout.parallel.dies or work.layout.size("attn_tp") > 1:
        raise ParallelError(f"{KIND}={size} of {work.layout.parallel.dies} dies with attn_tp="
                            f"{work.layout.size('attn_tp')}: a prompt is split over all dies, and heads are whole")
    tokens = row_of_tokens(work, KIND)
    if tokens % (2 * size):
        raise ParallelError(f"{KIND}={size}: {tokens} tokens cannot be divided into 2 · {size} segments: "
                            f"{tokens} / {2 * size} is no whole number; pad the prompt")
    return _Split(work, tokens).run()


def segments(tokens: int, size: int, rank: int) -> list[Piece]:
    """The tokens of ``rank``: a segment from the front of the prompt and one as far from its end."""
    each = tokens // (2 * size)
    return [(a, a + each) for a in (rank * each, (2 * size - 1 - rank) * each)]


class _Split(OwnRows):
    """``halves``: the joined results of both segments by attention, which reads all rows of ``keys``."""

    def __init__(self, work: Work, tokens: int) -> None:
        self.size, rank = work.layout.size(KIND), work.layout.position(KIND)
        self.each = tokens // (2 * self.size)
        super().__init__(work, KIND, work.layout.group(KIND), tokens, segments(tokens, self.size, rank))
        self.halves: dict[fx.Node, fx.Node] = {}
        self.keys: list[fx.Node] = []

    def run(self) -> int:
        """The number of attentions that were split."""
        self.spread()
        for kernel in self.editor.calls([*ATTENTION, INDEXER]):
            if kernel in self.stream and kernel not in self.halves:
                raise error(self.work.layout, KIND, kernel, "this attention cannot be split by tokens: it does not "
                                                            "read whole prompts, packed, by their own keys")
        self.gather(self.keys)
        return len(self.halves)

    def handlers(self) -> Mapping[Any, Handler]:
        """With attention, a call for each segment."""
        named: dict[str, Handler] = {
            **dict.fromkeys(FUSED, self._fused), SPARSE: self._sparse, INDEXER: self._indexer, PROLOG: self._prolog}
        found = {operator_named(name): handler for name, handler in named.items()}
        return {**super().handlers(), **found, operator.getitem: self._output}

    def in_order(self, rows: fx.Node) -> fx.Node:
        """Segments in the order of the prompt."""
        editor, size = self.editor, list(shape(rows))
        blocks = editor.reshape(rows, [2 * self.size, self.each, *size[1:]])
        order = [2 * j if j < self.size else 2 * (2 * self.size - 1 - j) + 1 for j in range(2 * self.size)]
        index = derived(self.work.program, editor, "cp_order", [], f"torch.tensor({order})")
        return editor.reshape(editor.call(aten.index_select.default, blocks, 0, index), size)

    def _prolog(self, node: fx.Node) -> Own | None:
        """An MLA prolog that gives new rows: its caches have a row per token and are not the model's."""
        if node.kwargs.get("cache_mode") != "TND" or node.kwargs.get("cache_index") is not None:
            return None
        args = list(cast("tuple[fx.Node, ...]", node.args))
        parts = {i: self.part(args[i], 0) for i in (0, 7, 8, 9, 10)}
        if len(shape(args[0])) != 2 or None in parts.values():
            return None
        new = self.editor.call(node.target, *(parts.get(i, a) for i, a in enumerate(args)), **node.kwargs)
        legal(self.work, self.kind, new)
        return new, 0

    def _attention(self, node: fx.Node, own: Sequence[Any], keys: Sequence[Any], lengths: tuple[str, str]) -> None:
        """One call per segment. ``own`` and ``keys`` are positions or names of arguments that have a row per token."""
        defaults = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]

        def value(name: Any) -> Any:
            return node.args[name] if isinstance(name, int) else node.kwargs.get(name, defaults.get(name))

        ends = value(lengths[0])
        present = [k for k in own if value(k) is not None]
        parts = {k: self.part(value(k), 0) for k in present}
        used = [k for k in keys if value(k) is not None]
        same = isinstance(ends, fx.Node) and ends is value(lengths[1]) and ends not in self.stream
        whole = all(shape(value(k))[0] == self.tokens for k in (*used, *present))
        plain = value("block_table") is None and value("pse_shift") is None and value("sparse_mode") == 3
        if None in parts.values() or not (same and whole and plain):
            return
        self.keys += [value(k) for k in used]
        found = []
        for half, (a, b) in enumerate(self.segments):
            changed = {k: self.editor.call(aten.slice.Tensor, cast(fx.Node, parts[k]), 0, half * self.each,
                                           (half + 1) * self.each) for k in present}
            changed |= {k: self.editor.call(aten.slice.Tensor, value(k), 0, 0, b) for k in used}
            seen = self.editor.call(aten.clamp.default, ends, None, b)
            asked = self.editor.call(aten.sub.Tensor, self.editor.call(aten.clamp.default, seen, a), a)
            changed |= {lengths[0]: asked, lengths[1]: seen}
            new = self.editor.call(node.target, *(changed.get(i, x) for i, x in enumerate(node.args)),
                                   **{k: changed.get(k, v) for k, v in node.kwargs.items()})
            legal(self.work, KIND, new)
            found.append(self.editor.item(new, 0))
        self.halves[node] = self.editor.call(aten.cat.default, found, 0)

    def _fused(self, node: fx.Node) -> None:
        if node.kwargs.get("input_layout") != "TND":
            return
        self._attention(node, [0, "query_rope"], [1, 2, "key_rope"], ("actual_seq_qlen", "actual_seq_kvlen"))

    def _sparse(self, node: fx.Node) -> None:
        if (node.kwargs.get("layout_query"), node.kwargs.get("layout_kv")) != ("TND", "TND"):
            return
        self._attention(node, [0, 3, "query_rope"], [1, 2, "key_rope"],
                               ("actual_seq_lengths_query", "actual_seq_lengths_kv"))

    def _indexer(self, node: fx.Node) -> None:
        if (node.kwargs.get("layout_query"), node.kwargs.get("layout_key")) != ("TND", "TND"):
            return
        self._attention(node, [0, 2], [1], ("actual_seq_lengths_query", "actual_seq_lengths_key"))

    def _output(self, node: fx.Node) -> Own | None:
        source, index = cast("tuple[fx.Node, int]", node.args)
        if source in self.halves:
            return (self.halves[source], 0) if index == 0 else None
        return self.item(node)
