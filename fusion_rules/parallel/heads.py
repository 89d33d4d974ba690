"""y = attention(heads) Woᵀ  →  all_reduce(attention(heads r) Wo[:, r]ᵀ) over attn_tp.

Parts by heads go up from the output projection: W_UV, the attention kernel, W_UK and W_UQ, or W_Q and the expansion
of latents in a naive prompt. Latents, their caches and the indexer stay whole: all heads read the same ones. Heads of
keys, which several query heads share, are cut with them, and so are the caches that hold them (`caches`). Every rank of
a group calls the graph with the same inputs but for these caches.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.caches import Caches, own_keys
from cannopy.fusion_rules.parallel.narrow import Handler, Narrow, Pieces, elementwise, total
from cannopy.fusion_rules.parallel.places import (
    attentions_behind,
    called,
    operands,
    projections_of_attention,
    without_projection,
)
from cannopy.fusion_rules.parallel.shards import Part
from cannopy.fusion_rules.parallel.tokens import Rows, after, error, legal
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, operator_named, shape

KIND, RULE = "attn_tp", "fused_infer_attention"
FUSED = ("npu::npu_fused_infer_attention_score_v2", "air::npu_fused_infer_attention_score_v2")
SPARSE = "npu::npu_sparse_flash_attention"
PROLOG = "npu::npu_mla_prolog_v3_functional"
PRODUCT = "npu::npu_transpose_batchmatmul"
ROTARY = ("cannopy::rotary", "npu::npu_rotary_mul", "npu::npu_interleave_rope")

_HEADS_AT: Mapping[str, tuple[int, int]] = {
    "TND": (1, 1), "TND_NTD": (1, 0), "BSND": (2, 2), "BNSD": (1, 1), "BNSD_BSND": (1, 2)}
"""Dimension of the heads in queries and in the result, by layout."""


def cut(work: Work) -> int:
    """Cut every attention; the number of them. Raises `ParallelError` where one cannot be cut."""
    return cut_projections(work, KIND, fused)


def cut_projections(work: Work, kind: str, kernel: Handler) -> int:
    """Cut the output projection of every attention by heads over the dies of ``kind``; ``kernel`` makes the part of a
    fused attention. The number of them. Raises `ParallelError` where one cannot be cut."""
    part, rows = Part(work.layout.position(kind), work.layout.size(kind)), Rows(work, kind)
    found = projections_of_attention(work.program, work.editor)
    for lost in without_projection(work.editor, found):
        raise error(work.layout, kind, lost, "no projection with a parameter for its matrix reads this attention")
    caches = Caches(work)
    narrow = Narrow(work, kind, None, _Attention().handlers(kernel) | caches.handlers())
    for node in found:
        _cut(work, rows, part, node, narrow)
    caches.write(narrow)
    narrow.check(*found)
    caches.finish()
    return len(found)


def _cut(work: Work, rows: Rows, part: Part, node: fx.Node, narrow: Narrow) -> None:
    editor, kind = work.editor, narrow.kind
    x, weight, bias = operands(node)
    kernel = _only(narrow, node, attentions_behind(x))
    heads = _heads(narrow, kernel)
    first, end = part.of(heads, f"{kind}: {heads} attention heads", kernel)
    if shape(x)[-1] % heads:
        raise narrow.error(node, f"{shape(x)[-1]} columns are no whole number for each of {heads} heads")
    width = shape(x)[-1] // heads
    columns = [(first * width, end * width)]
    inner = narrow.of(x, -1, columns)
    with editor.before(node):
        partial = editor.call(aten.linear.default, inner, narrow.weight(weight, 1, columns))
        editor.replace(node, rows.summed(partial, bias))


def _only(narrow: Narrow, node: fx.Node, kernels: Sequence[fx.Node]) -> fx.Node:
    if len(kernels) > 1:
        raise narrow.error(node, f"it reads {len(kernels)} kernels of attention, one can be cut by heads")
    return kernels[0]


def _heads(narrow: Narrow, kernel: fx.Node) -> int:
    """Query heads of an attention kernel."""
    if called(kernel, FUSED):
        return int(cast(int, kernel.kwargs.get("num_query_heads", 1)))
    if called(kernel, [SPARSE]):
        return shape(cast(fx.Node, kernel.args[0]))[_HEADS_AT[str(kernel.kwargs.get("layout_query", "BSND"))][0]]
    raise narrow.error(kernel, f"{kernel.target} is not cut by heads; it was not fused into an attention of the "
                               f"device, `cannopy explain` says why{_why_not_fused(narrow.work, kernel)}")


def _why_not_fused(work: Work, kernel: fx.Node) -> str:
    """What the fusion of attention has said of ``kernel``."""
    places = [m for m in work.log.places() if m.rule == RULE and m.anchor == kernel.name] if work.log else []
    return "".join(f": {m.reason} ({m.source}){f'; {m.remedy}' if m.remedy else ''}" for m in places[:1])


@dataclass
class _Attention:
    """Handlers of the operators of one attention. ``prologs``: what stands for an MLA prolog once it is cut."""

    prologs: dict[tuple[fx.Node, Pieces], fx.Node] = field(default_factory=dict)

    def handlers(self, kernel: Handler) -> dict[Any, Handler]:
        """By target; ``kernel`` is that of fused attention."""
        named: dict[str, Handler] = {
            **dict.fromkeys(FUSED, kernel), SPARSE: _sparse, PRODUCT: _product, PROLOG: self.prolog,
            **dict.fromkeys(ROTARY, _rotary),
        }
        found = {operator_named(name): handler for name, handler in named.items()}
        return {**found, aten.expand.default: _expand, aten.bmm.default: _bmm}

    def prolog(self, narrow: Narrow, item: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
        """An MLA prolog with the heads of a part; its caches and normed queries are those of all heads."""
        node, index = cast("tuple[fx.Node, int]", item.args)
        if index not in (0, 1) or dim != len(shape(item)) - 2:
            raise narrow.error(node, f"output {index} of the MLA prolog has no heads in dimension {dim}")
        if (node, pieces) not in self.prologs:
            self.prologs[node, pieces] = self._cut_prolog(narrow, node, pieces)
        new = self.prologs[node, pieces]
        with narrow.editor.before(after(new)):
            return narrow.editor.item(new, index)

    def _cut_prolog(self, narrow: Narrow, node: fx.Node, pieces: Pieces) -> fx.Node:
        _plain(narrow, node, ("k_nope_clip_alpha", "dequant_scale_w_uq_qr", "weight_quant_mode", "query_quant_mode",
                              "kv_cache_quant_mode"))
        args = list(cast("tuple[fx.Node, ...]", node.args))
        width = shape(args[2])[1] // shape(args[3])[0]
        with narrow.editor.before(node):
            args[2] = narrow.weight(args[2], 1, [(a * width, b * width) for a, b in pieces])
            args[3] = narrow.weight(args[3], 0, pieces)
            new = narrow.editor.call(node.target, *args, **node.kwargs)
            legal(narrow.work, narrow.kind, new)
            for item in [n for n in node.users if n.target is operator.getitem and n.args[1] not in (0, 1)]:
                narrow.editor.replace(item, narrow.editor.item(new, cast(int, item.args[1])))
                narrow.editor.graph.erase_node(item)
        return new


def _plain(narrow: Narrow, node: fx.Node, names: Sequence[str]) -> None:
    for name in names:
        if node.kwargs.get(name) not in (None, 0):
            raise narrow.error(node, f"{node.target} with {name} is not cut by heads")


def fused(narrow: Narrow, item: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """The heads of a part attend to all keys."""
    node, layout = fused_of(narrow, item, dim)
    _plain(narrow, node, ("pse_shift", "learnable_sink", "dequant_scale_query", "dequant_scale_key",
                          "dequant_scale_value", "quant_scale_out", "quant_scale_p", "dequant_scale_key_rope"))
    heads, kv = (cast(int, node.kwargs.get(k) or 0) for k in ("num_query_heads", "num_key_value_heads"))
    kv, at = kv or heads, _HEADS_AT[layout][0]
    parts: dict[int | str, tuple[int, Pieces]] = {0: (at, pieces), "query_rope": (at, pieces)}
    if kv > 1:
        keys = own_keys(narrow, node, heads, kv, pieces)
        parts |= {name: _of_keys(node, x, at, kv, keys) for name, x in (
            (1, node.args[1]), (2, node.args[2]), ("key_rope", node.kwargs.get("key_rope"))) if isinstance(x, fx.Node)}
        kv = total(keys)
    new = _with_parts(narrow, node, parts, num_query_heads=total(pieces), num_key_value_heads=kv)
    return narrow.editor.item(new, 0)


def _of_keys(node: fx.Node, key: fx.Node, at: int, kv: int, keys: Pieces) -> tuple[int, Pieces]:
    """Where the heads of ``keys`` stand in keys or values: those in a paged cache lie side by side in its rows."""
    if node.kwargs.get("block_table") is None:
        return at, keys
    if len(shape(key)) == 4:
        return 1, keys
    width = shape(key)[-1] // kv
    return 2, tuple((a * width, b * width) for a, b in keys)


def fused_of(narrow: Narrow, item: fx.Node, dim: int) -> tuple[fx.Node, str]:
    """The fused attention whose result ``item`` is, and its layout; an error unless ``dim`` has the heads."""
    node, index = cast("tuple[fx.Node, int]", item.args)
    layout = str(node.kwargs.get("input_layout", "BSH"))
    if layout not in _HEADS_AT or index != 0 or dim != _HEADS_AT[layout][1]:
        raise narrow.error(node, f"output {index} of layout {layout} has no heads in dimension {dim}")
    return node, layout


def _with_parts(narrow: Narrow, node: fx.Node, parts: Mapping[int | str, tuple[int, Pieces]],
                **changed: object) -> fx.Node:
    """The kernel with parts of these arguments, by place or name; all others are read once those are cut, which may
    have moved caches."""
    given = [*node.args]
    for i in [i for i in parts if isinstance(i, int)]:
        given[i] = narrow.of(cast(fx.Node, node.args[i]), *parts[i])
    named = {k: narrow.of(cast(fx.Node, node.kwargs[k]), *where) for k, where in parts.items()
             if isinstance(k, str) and node.kwargs.get(k) is not None}
    new = narrow.editor.call(node.target, *(given[i] if i in parts else arg for i, arg in enumerate(node.args)),
                             **{**node.kwargs, **named, **changed})
    legal(narrow.work, narrow.kind, new)
    return new


def _sparse(narrow: Narrow, item: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    node, index = cast("tuple[fx.Node, int]", item.args)
    at = _HEADS_AT[str(node.kwargs.get("layout_query", "BSND"))][0]
    if index != 0 or dim != at:
        raise narrow.error(node, f"output {index} of sparse attention has no heads in dimension {dim}")
    _plain(narrow, node, ("sinks",))
    return narrow.editor.item(_with_parts(narrow, node, {0: (at, pieces), "query_rope": (at, pieces)}), 0)


def _product(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """perm_y(perm_x1(x) · perm_x2(w)): only the batch of the product is kept apart."""
    _plain(narrow, node, ("bias", "scale"))
    perms = [cast("list[int]", node.kwargs.get(name) or [0, 1, 2]) for name in ("perm_x1", "perm_x2", "perm_y")]
    if perms[2][dim] != 0 or node.kwargs.get("batch_split_factor", 1) != 1:
        raise narrow.error(node, f"dimension {dim} of the product is not its batch")
    parts = [narrow.of(cast(fx.Node, x), perm[0], pieces) for x, perm in zip(node.args, perms[:2], strict=True)]
    new = narrow.editor.call(node.target, *parts, **node.kwargs)
    legal(narrow.work, narrow.kind, new)
    return new


def _bmm(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    if dim != 0:
        raise narrow.error(node, f"dimension {dim} of the product is not its batch")
    return narrow.editor.call(node.target, *(narrow.of(cast(fx.Node, x), 0, pieces) for x in node.args))


def _rotary(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    if dim == len(shape(node)) - 1:
        raise narrow.error(node, "the angles of a head belong together")
    return elementwise(narrow, node, dim, pieces)


def _expand(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    x, size = cast("tuple[fx.Node, list[int]]", node.args[:2])
    at = dim - (len(size) - len(shape(x)))
    size = [*size]
    size[dim] = total(pieces)
    if at >= 0 and shape(x)[at] != 1:
        x = narrow.of(x, at, pieces)
    return narrow.editor.call(node.target, x, size)
