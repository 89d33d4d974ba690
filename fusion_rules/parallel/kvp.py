"""Rows of latent caches over the dies of kvp, every n-th position on each; what they attend to is joined by its LSE.

    cache[slot] = x          →  cache[slot // n] = x on the die r = slot % n, into block 0 on the others
    attention(q, cache, len) →  attention_update(all_to_all(attention(q, own rows, (len + n - 1 - r) // n)))
    y = a Woᵀ                →  all_reduce(a[heads r] Wo[:, heads r]ᵀ)

Dies of a group are called with the same inputs: block tables, slots and lengths as for one die. Their caches have room
for an n-th of the rows: b blocks of s rows are read as n · b blocks of s / n. Block 0 belongs to no request. Each die
attends with all heads, then heads are exchanged, so that W_UV and Wo are cut by heads. Every query is a request of its
own with its own length, since rows of several queries would not end where a causal mask of the kernel does.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_to_all
from cannopy.fusion_rules.parallel.heads import PROLOG, cut_projections, fused, fused_of
from cannopy.fusion_rules.parallel.narrow import Narrow, Pieces
from cannopy.fusion_rules.parallel.places import called
from cannopy.fusion_rules.parallel.tokens import after, error, legal
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, is_call, operator_named, shape
from cannopy.fx_passes.parallel import ParallelError
from cannopy.fx_passes.weight_plan import derived

KIND = "kvp"
UPDATE = "npu::npu_attention_update"
ROWS = "npu::npu_kv_rmsnorm_rope_cache_v2_functional"
EMPTY = -1e30
"""LSE of a die that has no key of a query: exp of it is 0 next to any other, and where no die has one, which -inf would
turn into NaN, the zeros of all are added."""


def cut(work: Work) -> int:
    """Spread the caches; the number of writes. Raises `ParallelError` where something else reads or writes one."""
    layout = work.layout
    for other in ("attn_tp", "o_proj_tp"):
        if layout.size(other) > 1:
            raise ParallelError(f"{KIND}={layout.size(KIND)} with {other}={layout.size(other)}: {KIND} cuts the output "
                                f"projections already, by heads; leave {other} out")
    split = _Split(work)
    if layout.size("cp") == 1:
        cut_projections(work, KIND, split.attention)
        work.editor.sweep()
    return split.writes()


@dataclass
class _Split:
    """``own``: attention over the rows of this die. ``shared``: what all layers read, by what it is made of."""

    work: Work
    own: set[fx.Node] = field(default_factory=set)
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Dies that share a cache."""
        return self.work.layout.size(KIND)

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return self.work.layout.position(KIND)

    def attention(self, narrow: Narrow, item: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
        """Heads of this die of a fused attention: one over fresh keys is computed, one over a cache exchanged."""
        node, layout = fused_of(narrow, item, dim)
        if node.kwargs.get("block_table") is None:
            return fused(narrow, item, dim, pieces)
        editor = self.work.editor
        new = self._partial(narrow, node, layout)
        own, (first, last) = cast(fx.Node, new.kwargs["actual_seq_kvlen"]), pieces[0]
        none = self._once(("none", own), [own], lambda: editor.call(aten.eq.Scalar, own, 0))
        tokens, heads = shape(none)[0], last - first
        out, lse = editor.item(new, 0), editor.reshape(editor.item(new, 1), [tokens, heads * self.size])
        if dim == 1:
            out = editor.call(aten.permute.default, out, [1, 0, 2])
        out = editor.call(aten.masked_fill.Scalar, out, editor.reshape(none, [1, tokens, 1]), 0.0)
        lse = editor.call(aten.masked_fill.Scalar, lse, editor.reshape(none, [tokens, 1]), EMPTY)
        group = self.work.layout.group(KIND)
        outs = all_to_all(editor, out, group)
        sums = all_to_all(editor, editor.call(aten.permute.default, lse, [1, 0]), group)

        def parts(x: fx.Node, size: list[int]) -> list[fx.Node]:
            cuts = [editor.call(aten.slice.Tensor, x, 0, i * heads, (i + 1) * heads) for i in range(self.size)]
            return [editor.reshape(part, size) for part in cuts]

        width = shape(out)[-1]
        joined = editor.call(operator_named(UPDATE), parts(sums, [heads * tokens]),
                             parts(outs, [heads * tokens, width]), 0)
        legal(self.work, KIND, joined)
        found = editor.reshape(editor.item(joined, 0), [heads, tokens, width])
        return found if dim == 0 else editor.call(aten.permute.default, found, [1, 0, 2])

    def _partial(self, narrow: Narrow, node: fx.Node, layout: str) -> fx.Node:
        """The attention ``node`` with all heads over the rows of this die, and its LSE."""
        editor, given = self.work.editor, node.kwargs
        block, heads = cast(int, given["block_size"]), given.get("num_key_value_heads")
        if heads != 1 or given.get("query_rope") is None or layout not in ("TND", "TND_NTD"):
            raise narrow.error(node, f"{heads} heads of keys in layout {layout}: only caches of latents of packed "
                                     "tokens are spread")
        rows = self._own_rows(node, block)
        queries, ends = self._queries(narrow, node)
        key, value, rope = (self._rows(cast(fx.Node, x), rows) for x in (*node.args[1:3], given["key_rope"]))
        new = editor.call(node.target, node.args[0], key, value, **{
            **given, "key_rope": rope, "atten_mask": None, "sparse_mode": 0, "block_size": rows,
            "return_softmax_lse": True, "actual_seq_qlen": ends, **self._keys(node, queries)})
        legal(self.work, KIND, new)
        self.own.add(new)
        return new

    def _own_rows(self, node: fx.Node, block: int) -> int:
        """Rows of a block on each die."""
        if block % (16 * self.size):
            raise error(self.work.layout, KIND, node,
                        f"blocks of {block} rows: {block} / {self.size} is no multiple of 16 rows")
        return block // self.size

    def _queries(self, narrow: Narrow, node: fx.Node) -> tuple[int, fx.Node]:
        """Queries of each request, and the ends of single ones."""
        ends, tokens = cast(fx.Node, node.kwargs["actual_seq_qlen"]), shape(cast(fx.Node, node.args[0]))[0]
        requests = shape(ends)[0]
        each = tokens // requests
        if not is_call(ends, aten.arange.start_step) or ends.args[:3] != (each, tokens + 1, each) or (
                node.kwargs.get("sparse_mode") != 3 and each > 1):
            raise narrow.error(node, "the graph does not say that every request has as many queries, in causal order")
        return each, self._once(("ends", tokens), [ends], lambda: self.work.editor.call(
            aten.arange.start_step, 1, tokens + 1, 1, **ends.kwargs))

    def _rows(self, key: fx.Node, rows: int) -> fx.Node:
        blocks, block, width = shape(key)
        return self.work.editor.reshape(key, [blocks * block // rows, rows, width])

    def _keys(self, node: fx.Node, queries: int) -> dict[str, fx.Node]:
        """Block table and number of own keys of every query: positions r, r + n, … of those that it sees."""
        editor = self.work.editor
        lengths, table = (cast(fx.Node, node.kwargs[k]) for k in ("actual_seq_kvlen", "block_table"))
        requests, blocks = shape(table)

        def made() -> dict[str, fx.Node]:
            seen = editor.reshape(lengths, [requests, 1])
            back = derived(self.work.program, editor, "kvp_queries", [], f"torch.arange({1 - queries}, 1)")
            seen = editor.reshape(editor.call(aten.add.Tensor, seen, back), [requests * queries])
            own = self._divided(editor.call(aten.add.Tensor, seen, self.size - 1 - self.rank))
            each = editor.call(aten.expand.default, editor.reshape(table, [requests, 1, blocks]),
                               [requests, queries, blocks])
            return {"actual_seq_kvlen": editor.call(aten.clamp.default, own, 0),
                    "block_table": editor.reshape(each, [requests * queries, blocks])}

        found: dict[str, fx.Node] = self._once((lengths, table, queries), [lengths, table], made)
        return found

    def writes(self) -> int:
        """Give every write of a cache the slots of this die; the number of writers."""
        editor = self.work.editor
        writers: dict[fx.Node, fx.Node] = {}
        for copy in editor.calls([aten.copy_.default]):
            cache, value = cast("tuple[fx.Node, fx.Node]", copy.args[:2])
            writer = cast(fx.Node, value.args[0]) if is_call(value, operator.getitem) else value
            index = self._index(writer)
            if index is None or cache not in writer.all_input_nodes:
                raise error(self.work.layout, KIND, writer, f"{writer.name} writes {cache.name}: only MLA prologs and "
                            "norms with rotation into paged caches are spread; cannopy explain, without a layout, "
                            "tells what did not fuse")
            writers[writer] = cache
            for x in (cache, value):
                self._check(x, {copy, writer})
        for writer, cache in writers.items():
            at, slots = cast("tuple[Any, fx.Node]", self._index(writer))
            local = self._slots(slots, self._own_rows(writer, shape(cache)[1]))
            if isinstance(at, int):
                writer.update_arg(at, local)
            else:
                writer.update_kwarg(at, local)
        return len(writers)

    def _index(self, writer: fx.Node) -> tuple[int | str, fx.Node] | None:
        """Where the slots of a writer stand, and what they are; None where it is none that is known."""
        if called(writer, [PROLOG]) and writer.kwargs.get("cache_mode") == "PA_BSND":
            return "cache_index", cast(fx.Node, writer.kwargs["cache_index"])
        if called(writer, [ROWS]) and writer.kwargs.get("cache_mode") == "PA_BNSD":
            return 4, cast(fx.Node, writer.args[4])
        return None

    def _check(self, cache: fx.Node, known: set[fx.Node]) -> None:
        """An error where something but ``known`` and own attention reads rows of ``cache``."""
        for user in cache.users:
            if is_call(user, aten.reshape.default):
                self._check(user, known)
            elif user not in known and user not in self.own:
                raise error(self.work.layout, KIND, user, f"{user.name} reads the cache {cache.name}, which is spread")

    def _slots(self, slots: fx.Node, rows: int) -> fx.Node:
        """The slot of each token on this die: its own, or one of block 0 where it belongs to another die."""
        editor, tokens = self.work.editor, shape(slots)[0]

        def made() -> fx.Node:
            spare = derived(self.work.program, editor, "kvp_spare", [], f"torch.arange({tokens}) % {rows}")
            mine = editor.call(aten.eq.Scalar, editor.call(aten.remainder.Scalar, slots, self.size), self.rank)
            return editor.call(aten.where.self, mine, self._divided(slots), spare)

        found: fx.Node = self._once((slots, rows), [slots], made)
        return found

    def _divided(self, x: fx.Node) -> fx.Node:
        """``x`` // dies of a group, by a tensor, which is what torchair has a converter for."""
        size = derived(self.work.program, self.work.editor, "kvp_dies", [], f"torch.tensor([{self.size}])")
        return self.work.editor.call(aten.floor_divide.default, x, size)

    def _once(self, key: Any, of: list[fx.Node], make: Any) -> Any:
        """What ``make`` emits behind the last of ``of``, once for all layers."""
        if key not in self.shared:
            last = max(of)
            with self.work.editor.before(after(last), like=last):
                self.shared[key] = make()
        return self.shared[key]
