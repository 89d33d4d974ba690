"""A prompt over the dies of cp: each has two segments of the tokens, attends to all keys before, and gathers the rest.

    f(x)  →  all_gather(f(x[own])) in order,  own = segments r and 2·cp - 1 - r of 2·cp (as many keys for every rank)
    attention(q, k, lengths)  →  attention(q[a:b], k[:b], ends clamped to [a, b]) for each of both segments

Every rank is called with the whole prompt. Operations that know tokens apart run on own rows; what needs them all
(caches, keys, results) reads gathered rows, so caches are written in full by every rank. An attention that cannot be
split by tokens is a `ParallelError`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_gather
from cannopy.fusion_rules.parallel.heads import FUSED, PRODUCT, PROLOG, ROTARY, SPARSE
from cannopy.fusion_rules.parallel.mixtures import Mixture, mixtures, mlp
from cannopy.fusion_rules.parallel.places import ATTENTION, SWIGLU, pointwise
from cannopy.fusion_rules.parallel.tokens import error, legal
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fusion_rules.rewrite.expert_calls import DROPPED
from cannopy.fx_passes.graph import aten, is_call, operator_named, shape
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.weight_plan import derived

KIND = "cp"
INDEXER = "npu::npu_lightning_indexer"
Own = tuple[fx.Node, int]
"""A value of this rank's tokens and the dimension that they are in."""

_FIRST = ("npu::npu_rms_norm", "cannopy::rms_norm", "npu::npu_moe_gating_top_k", SWIGLU)
"""Operators whose first operand has the tokens, which the last dimension is not."""


def cut(work: Work) -> int:
    """Split the prompt; the number of attentions. Raises `ParallelError` where one cannot be split."""
    size = work.layout.size(KIND)
    if size != work.layout.parallel.dies or work.layout.size("attn_tp") > 1:
        raise ParallelError(f"{KIND}={size} of {work.layout.parallel.dies} dies with attn_tp="
                            f"{work.layout.size('attn_tp')}: a prompt is split over all dies, and heads are whole")
    ids = {cast(fx.Node, n.args[1]) for n in work.editor.calls([aten.embedding.default])}
    tokens = {math.prod(shape(n)) for n in ids}
    if len(tokens) != 1 or any(shape(n)[:-1] != (1,) * (len(shape(n)) - 1) for n in ids):
        raise ParallelError(f"{KIND}={size}: one row of tokens is split, found {[list(shape(n)) for n in ids]}")
    return _Split(work, tokens.pop()).run()


class _Split:
    """``own``: this rank's version of nodes of the graph; ``stream``: nodes that are computed from embedded tokens;
    ``halves``: the joined results of both segments by attention, which reads all rows of ``keys``."""

    def __init__(self, work: Work, tokens: int) -> None:
        self.work, self.editor, self.tokens = work, work.editor, tokens
        self.size, self.rank = work.layout.size(KIND), work.layout.position(KIND)
        if tokens % (2 * self.size):
            raise ParallelError(f"{KIND}={self.size}: {tokens} tokens cannot be divided into 2 · {self.size} segments: "
                                f"{tokens} / {2 * self.size} is no whole number; pad the prompt")
        self.each = tokens // (2 * self.size)
        starts = self.rank * self.each, (2 * self.size - 1 - self.rank) * self.each
        self.segments = [(a, a + self.each) for a in starts]
        self.own: dict[fx.Node, Own] = {}
        self.stream: set[fx.Node] = set()
        self.chosen: dict[tuple[fx.Node, int], fx.Node] = {}
        self.halves: dict[fx.Node, fx.Node] = {}
        self.keys: list[fx.Node] = []

    def run(self) -> int:
        """The number of attentions that were split."""
        routed = {m.end: m for m in mixtures(self.work, KIND)} if self.work.editor.calls(_MIXTURE) else {}
        handlers = self._handlers()
        for node in list(self.editor.graph.nodes):
            if node.op != "call_function":
                continue
            if is_call(node, aten.embedding.default) or any(n in self.stream for n in node.all_input_nodes):
                self.stream.add(node)
                handler = handlers.get(node.target, self._elementwise if pointwise(node) else None)
                with self.editor.before(node):
                    found = self._mixture(routed[node]) if node in routed else handler(node) if handler else None
                if found is not None:
                    self.own[node] = found
        for kernel in self.editor.calls([*ATTENTION, INDEXER]):
            if kernel in self.stream and kernel not in self.halves:
                raise error(self.work.layout, KIND, kernel, "this attention cannot be split by tokens: it does not "
                                                            "read whole prompts, packed, by their own keys")
        for end in routed:
            if end not in self.own:
                raise error(self.work.layout, KIND, end, "these experts do not read rows of tokens, one each")
        for node in self._wanted():
            with self.editor.before(node):
                self.editor.replace(node, self._gathered(*self.own[node]))
        return len(self.halves)

    def _wanted(self) -> list[fx.Node]:
        """Nodes whose rows of all ranks something reads, in graph order."""
        ends = [n for n in self.editor.graph.nodes if n.op == "output" or is_call(n, aten.copy_.default)]
        todo, seen = [*(n for e in ends for n in e.all_input_nodes), *self.keys], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in seen and node in self.stream:
                seen.add(node)
                todo += [] if node in self.own else node.all_input_nodes
        return sorted(n for n in seen if n in self.own)

    def _gathered(self, own: fx.Node, dim: int) -> fx.Node:
        """All rows in the order of the prompt."""
        editor, size = self.editor, list(shape(own))
        if any(n != 1 for n in size[:dim]):
            raise error(self.work.layout, KIND, own, f"tokens in dimension {dim} of {size} are not gathered")
        flat = all_gather(editor, editor.reshape(own, [2 * self.each, *size[dim + 1 :]]), self.work.layout.group(KIND))
        blocks = editor.reshape(flat, [2 * self.size, self.each, *size[dim + 1 :]])
        order = [2 * j if j < self.size else 2 * (2 * self.size - 1 - j) + 1 for j in range(2 * self.size)]
        index = derived(self.work.program, editor, "cp_order", [], f"torch.tensor({order})")
        size[dim] = self.tokens
        return editor.reshape(editor.call(aten.index_select.default, blocks, 0, index), size)

    def part(self, node: fx.Node, dim: int) -> fx.Node | None:
        """``node`` with this rank's tokens in dimension ``dim``; None where that is not known."""
        if node in self.stream:
            own = self.own.get(node)
            return own[0] if own is not None and own[1] == dim else None
        if shape(node)[dim] != self.tokens:
            return None
        if (node, dim) not in self.chosen:
            parts = [self.editor.call(aten.slice.Tensor, node, dim, a, b) for a, b in self.segments]
            self.chosen[node, dim] = self.editor.call(aten.cat.default, parts, dim)
        return self.chosen[node, dim]

    def at(self, node: fx.Node) -> int | None:
        """The dimension of ``node`` that has tokens, where its rows are known."""
        own = self.own.get(node)
        return None if own is None else own[1]

    def _first(self, node: fx.Node) -> Own | None:
        x = cast(fx.Node, node.args[0])
        dim = self.at(x)
        if dim is None or dim == len(shape(x)) - 1:
            return None
        return self.editor.call(node.target, self.own[x][0], *node.args[1:], **node.kwargs), dim

    def _layer_norm(self, node: fx.Node) -> Own | None:
        return self._first(node) if len(cast("list[int]", node.args[1])) == 1 else None

    def _linear(self, node: fx.Node) -> Own | None:
        return None if any(n in self.stream for n in node.all_input_nodes[1:]) else self._first(node)

    def _added_norm(self, node: fx.Node) -> Own | None:
        x, residual = cast("tuple[fx.Node, fx.Node]", node.args[:2])
        dim = self.at(x)
        both = None if dim is None else [self.part(n, dim) for n in (x, residual)]
        if both is None or dim is None or None in both or dim == len(shape(x)) - 1:
            return None
        return self.editor.call(node.target, *both, *node.args[2:], **node.kwargs), dim

    def _item(self, node: fx.Node) -> Own | None:
        source, index = cast("tuple[fx.Node, int]", node.args)
        own = self.own.get(source)
        return None if own is None else (self.editor.item(own[0], index), own[1])

    def _embedding(self, node: fx.Node) -> Own | None:
        weight, ids = cast("tuple[fx.Node, fx.Node]", node.args[:2])
        dim = len(shape(ids)) - 1
        part = self.part(ids, dim)
        return None if part is None else (self.editor.call(node.target, weight, part), dim)

    def _reshape(self, node: fx.Node) -> Own | None:
        x, new = cast(fx.Node, node.args[0]), list(shape(node))
        dim, old = self.at(x), shape(x)
        fits = [e for e in range(len(new)) if dim is not None and new[e] == old[dim]
                and math.prod(new[:e]) == math.prod(old[:dim])]
        if not fits:
            return None
        new[fits[0]] = 2 * self.each
        return self.editor.call(aten.reshape.default, self.own[x][0], new), fits[0]

    def _slice(self, node: fx.Node) -> Own | None:
        x, dim = cast("tuple[fx.Node, int]", (*node.args, 0)[:2])
        return None if self.at(x) in (None, dim % len(shape(x))) else self._first_any(node)

    def _first_any(self, node: fx.Node) -> Own:
        own, dim = self.own[cast(fx.Node, node.args[0])]
        return self.editor.call(node.target, own, *node.args[1:], **node.kwargs), dim

    def _permute(self, node: fx.Node) -> Own | None:
        x, dims = cast("tuple[fx.Node, list[int]]", node.args)
        dim = self.at(x)
        return None if dim is None else (self.editor.call(node.target, self.own[x][0], dims), dims.index(dim))

    def _cat(self, node: fx.Node) -> Own | None:
        xs, at = cast("tuple[list[fx.Node], int]", (*node.args, 0)[:2])
        dim = next((d for x in xs if (d := self.at(x)) is not None), None)
        parts = [None if dim is None else self.part(x, dim) for x in xs]
        if dim is None or None in parts or at % len(shape(node)) == dim:
            return None
        return self.editor.call(node.target, parts, at), dim

    def _elementwise(self, node: fx.Node) -> Own | None:
        behind = next((len(shape(x)) - d for x in node.all_input_nodes if (d := self.at(x)) is not None), None)
        if behind is None or shape(node)[-behind] != self.tokens:
            return None
        parts: dict[fx.Node, fx.Node] = {}
        for x in node.all_input_nodes:
            rank = len(shape(x))
            if rank >= behind and shape(x)[-behind] != 1:
                found = self.part(x, rank - behind)
                if found is None:
                    return None
                parts[x] = found
            elif x in self.stream:
                return None
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: parts.get(x, x))
        return self.editor.call(node.target, *args, **kwargs), len(shape(node)) - behind

    def _rotary(self, node: fx.Node) -> Own | None:
        dim = self.at(cast(fx.Node, node.args[0]))
        return None if dim == len(shape(node)) - 1 else self._elementwise(node)

    def _product(self, node: fx.Node) -> Own | None:
        """perm_y(perm_x1(x) · w): tokens are rows of the matrices of x."""
        x, dim = cast(fx.Node, node.args[0]), self.at(cast(fx.Node, node.args[0]))
        rows, out = (cast("list[int]", node.kwargs.get(name) or [0, 1, 2]) for name in ("perm_x1", "perm_y"))
        if dim is None or rows[1] != dim or any(n in self.stream for n in node.all_input_nodes[1:]):
            return None
        return self.editor.call(node.target, self.own[x][0], *node.args[1:], **node.kwargs), out.index(1)

    def _prolog(self, node: fx.Node) -> Own | None:
        """An MLA prolog that gives new rows: its caches have a row per token and are not the model's."""
        if node.kwargs.get("cache_mode") != "TND" or node.kwargs.get("cache_index") is not None:
            return None
        args = list(cast("tuple[fx.Node, ...]", node.args))
        parts = {i: self.part(args[i], 0) for i in (0, 7, 8, 9, 10)}
        if len(shape(args[0])) != 2 or None in parts.values():
            return None
        new = self.editor.call(node.target, *(parts.get(i, a) for i, a in enumerate(args)), **node.kwargs)
        legal(self.work, KIND, new)
        return new, 0

    def _mixture(self, m: Mixture) -> Own | None:
        editor = self.editor
        given = [self.part(n, 0) for n in (m.x, m.ids, m.scales, *m.added)]
        if None in given or m.end.kwargs.get("drop_pad_mode") is None or len(m.init.args) > 2:
            return None
        x, ids, scales, *added = cast("list[fx.Node]", given)
        tokens, top_k = shape(ids)
        sent = editor.call(m.init.target, x, ids, **{**m.init.kwargs, "active_num": tokens * top_k})
        out = mlp(self.work, m, editor.item(sent, 0), m.weights, editor.item(sent, 2))
        if m.end.kwargs["drop_pad_mode"] == DROPPED:
            out = editor.reshape(out, [top_k, tokens, shape(x)[1]])
        skips = [*added, None, None][:2]
        end = editor.call(m.end.target, out, *skips, None, scales, editor.item(sent, 1), None,
                          drop_pad_mode=m.end.kwargs["drop_pad_mode"])
        for node in (sent, end):
            legal(self.work, KIND, node)
        return end, 0

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
        return self._item(node)

    def _handlers(self) -> Mapping[Any, Callable[[fx.Node], Own | None]]:
        named: dict[str, Callable[[fx.Node], Own | None]] = {
            **dict.fromkeys(_FIRST, self._first), **dict.fromkeys(ROTARY, self._rotary),
            **dict.fromkeys(FUSED, self._fused), SPARSE: self._sparse, INDEXER: self._indexer,
            "npu::npu_add_rms_norm": self._added_norm, PRODUCT: self._product, PROLOG: self._prolog,
        }
        return {
            **{operator_named(name): handler for name, handler in named.items()},
            aten.linear.default: self._linear, aten.embedding.default: self._embedding, aten.cat.default: self._cat,
            aten.reshape.default: self._reshape, aten.slice.Tensor: self._slice, aten.permute.default: self._permute,
            aten._to_copy.default: self._elementwise, aten.native_layer_norm.default: self._layer_norm,
            operator.getitem: self._output,
        }


_MIXTURE = ("npu::npu_moe_finalize_routing",)
