"""The low-rank chains of MLA in front of attention over all latents  →  npu_mla_prolog_v3.

    q_c = rms(x W_DQ) γ_q;  q = q_c W_UQ;  query = q_nope W_UK;  query_rope = rope(q_pe)
    c, r = x W_DKV;  latent cache[slot] = rms(c) γ_kv;  rope cache[slot] = rope(r)

It matches upwards from the fused attention in its absorbed form. Where elements come from is compared as strided views,
so that heads may stand before or behind the tokens; the caches may be static or paged. They become graph inputs in
block form and are updated in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any as Anything
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import RESHAPE, SWAP_HEADS, computed_weight
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.engine.torchair_ops import FUSED_INFER_ATTENTION
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fusion_rules.rewrite import positions
from cannopy.fusion_rules.rewrite.attention_operands import SWAP
from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import aten, is_call, shape
from cannopy.fx_passes.strides import View, view
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

PATTERN = op(
    f"air::{FUSED_INFER_ATTENTION}",
    Through(op(aten.permute.default, op(aten.matmul.default, Any("q_nope"), Any("w_uk")), SWAP_HEADS), over=RESHAPE),
    Any("latents"),
    Any("latents"),
    rest=True,
    query_rope=Any("q_rope"),
    key_rope=Any("ropes"),
    input_layout=Literal("TND_NTD"),
)
DOWN = {"weight_dq": "w[0].t()", "weight_uq_qr": "w[0].t()", "weight_dkv_kr": "w[0].t()"}


@dataclass(frozen=True)
class Written:
    """A cache input of the graph and its write: ``index`` has a slot per token, or a position per query of each
    request."""

    cache: fx.Node
    new: fx.Node
    index: fx.Node
    value: fx.Node


@dataclass(frozen=True)
class Turned:
    """A rotation of tokens [B, S, heads, D]: what is turned, and its tables [B, S, D / 2]."""

    node: fx.Node
    x: View
    tables: tuple[View, View]


@dataclass(frozen=True)
class Chain:
    """Everything that the operator takes the place of."""

    x: fx.Node
    weights: dict[str, fx.Node]
    norms: tuple[fx.Node, fx.Node]
    key: Turned
    latent: Written
    rope: Written


def _sizes(match: Match) -> tuple[int, int, int, int]:
    """B, N, S and the width of a head of q without its rotated part."""
    batch, heads, queries, nope = shape(match["q_nope"])
    return batch, heads, queries, nope


def _chain(match: Match) -> Chain | Refusal:
    batch, heads, queries, nope = _sizes(match)
    tokens, rank, rope = batch * queries, shape(match["latents"])[-1], shape(match["q_rope"])[-1]
    up = view(match["q_nope"])
    width = nope + rope
    steps = (queries * heads * width, width, heads * width, 1)
    turned = _turned(match["q_rope"], (batch, queries, heads, rope))
    if not is_call(up.source, aten.linear.default) or not up.matches((batch, heads, queries, nope), steps):
        return _refused(match["q_nope"], "the queries are not the first part of each head of one projection")
    if turned is None or turned.x.source is not up.source or not turned.x.matches(
            (batch, queries, heads, rope), (queries * heads * width, heads * width, width, 1), nope):
        return _refused(match["q_rope"], "the rotated queries are not the second part of each head of that projection")
    written = [_written(match[name], tokens, queries) for name in ("latents", "ropes")]
    if written[0] is None or written[1] is None or written[0].index is not written[1].index:
        return _refused(match["latents"], "both caches are not written once, at the same places, for all tokens")
    norm = view(written[0].value).reshape((tokens, rank))
    key = _turned(written[1].value, (batch, queries, 1, rope))
    if norm is None or not _named(norm.source, "rms_norm") or norm != View.whole(norm.source).reshape((tokens, rank)):
        return _refused(written[0].value, "the latent cache does not take a normalised latent")
    if key is None or key.tables != turned.tables:
        return _refused(written[1].value, "the rope cache does not take a part that is rotated as the queries are")
    return _down(match, up.source, norm.source, key, cast("list[Written]", written), tokens)


def _down(match: Match, up: fx.Node, norm: fx.Node, key: Turned, written: list[Written],
          tokens: int) -> Chain | Refusal:
    """The projections that both chains start with."""
    rank, rope = shape(match["latents"])[-1], shape(match["q_rope"])[-1]
    latent = view(cast(fx.Node, norm.args[0])).reshape((tokens, rank))
    turned = key.x.reshape((tokens, rope))
    down = latent.source if latent is not None else norm
    if latent is None or turned is None or turned.source is not down or not is_call(down, aten.linear.default) or not (
        latent.matches((tokens, rank), (rank + rope, 1)) and turned.matches((tokens, rope), (rank + rope, 1), rank)
    ):
        return _refused(norm, "latent and rotated part are not the first and the second part of one projection")
    low = _behind(up.args[0])
    if not _named(low, "rms_norm"):
        return _refused(up, f"the queries come from {describe(low)}, not from a normalised low-rank latent")
    first = _behind(cast(fx.Node, low).args[0])
    if not is_call(first, aten.linear.default):
        return _refused(cast(fx.Node, low), "the normalised latent of the queries is not that of a projection, as it "
                        "is with q_lora_rank")
    linears = cast("tuple[fx.Node, ...]", (first, up, down))
    if any(len(linear.args) > 2 for linear in linears):
        return _refused(match.anchor, "a projection has a bias, which the operator does not add")
    inputs = [_behind(linear.args[0]) for linear in (linears[0], linears[2])]
    if inputs[0] is not inputs[1]:
        return _refused(down, "the query and the key/value chain read different hidden states")
    weights = dict(zip(DOWN, (cast(fx.Node, linear.args[1]) for linear in linears), strict=True))
    return Chain(cast(fx.Node, inputs[0]), weights, (cast(fx.Node, low), norm), key, written[0], written[1])


def _refused(node: fx.Node, reason: str) -> Refusal:
    return Refusal(reason, node, "operand", "the chains of MLA: low-rank projections, norms, rotation, cache write",
                   describe(node), "write the attention as DeepSeek does, with q_lora_rank and no factor in between")


def _named(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and str(node.target) == f"cannopy.{name}.default"


def _behind(node: object) -> object:
    while is_call(node, aten.reshape.default):
        node = cast(fx.Node, node).args[0]
    return node


def _turned(node: fx.Node, size: tuple[int, int, int, int]) -> Turned | None:
    """The rotation that ``node`` is the result of, seen as [B, S, heads, D]."""
    while is_call(node, aten.reshape.default):
        node = cast(fx.Node, node.args[0])
    swapped = is_call(node, aten.permute.default) and node.args[1] == SWAP
    source = cast(fx.Node, node.args[0]) if swapped else node
    if not _named(source, "rotary") or source.args[3] is not True:
        return None
    x, cos, sin = cast("tuple[fx.Node, ...]", source.args[:3])
    whole = shape(source)
    seen = [view(x), *(view(table).expand((*whole[:-1], whole[-1] // 2)) for table in (cos, sin))]
    if swapped:
        seen = [v.permute(SWAP) for v in seen]
    found = [v.reshape((*size[:3], v.size[-1])) for v in seen]
    if any(v is None for v in found) or math.prod(size) != math.prod(whole):
        return None
    turned, *tables = cast("list[View]", found)
    if size[2] > 1 and any(t.stride[2] for t in tables):
        return None
    by_token = [View(t.source, (*size[:2], t.size[3]), (*t.stride[:2], t.stride[3]), t.offset) for t in tables]
    return Turned(source, turned, (by_token[0], by_token[1]))


def _written(node: fx.Node, tokens: int, queries: int) -> Written | None:
    new = _behind(node)
    if not is_call(new, aten.index_copy.default):
        return None
    base, dim, index, value = cast("tuple[fx.Node, int, fx.Node, fx.Node]", cast(fx.Node, new).args)
    size = shape(cast(fx.Node, new))
    dim %= len(size)
    lead = math.prod(size[:dim])
    if shape(index) != (tokens // lead if lead else 0,) or (lead != 1 and shape(index) != (queries,)):
        return None
    cache = _behind(base)
    return Written(cache, cast(fx.Node, new), index, value) if isinstance(cache, fx.Node) else None


def check(match: Match, ctx: Context) -> Refusal | None:
    """Both chains read one input, the caches are graph inputs written back, sizes and dtypes are in the contract."""
    chain = _chain(match)
    if isinstance(chain, Refusal):
        return chain
    for written in (chain.latent, chain.rope):
        reason = rebind.why_not(ctx.program, written.cache, _blocks(match, written))
        if reason is None and rebind.write_of(written.cache) is None:
            reason = f"{written.cache.name} is not written back"
        if reason is not None:
            return Refusal(f"cache: {reason}", written.new, "cache",
                           "a cache that is a graph input, written once and read after that", reason,
                           "pass a cache and write it once per call, before the attention reads it")
    for name, weight in {**chain.weights, "weight_uk": match["w_uk"]}.items():
        reason = why_not_weight(ctx.program, weight)
        if reason is not None:
            return computed_weight(name, weight, reason)
    return _illegal(match, ctx, chain)


def _blocks(match: Match, written: Written) -> list[int]:
    block, width = match.anchor.kwargs["block_size"], shape(written.value)[-1]
    assert isinstance(block, int)
    return [math.prod(shape(written.new)) // width // block, block, 1, width]


def _attributes(chain: Chain) -> dict[str, Anything]:
    eps = [float(cast(float, norm.args[2])) for norm in chain.norms]
    return {"rmsnorm_epsilon_cq": eps[0], "rmsnorm_epsilon_ckv": eps[1], "cache_mode": "PA_BSND"}


def _illegal(match: Match, ctx: Context, chain: Chain) -> Refusal | None:
    batch, _, queries, _ = _sizes(match)
    tokens, rope, empty = batch * queries, shape(match["q_rope"])[-1], ctx.editor.empty
    weights = {k: preview(ctx.editor, [chain.weights[k]], recipe) for k, recipe in DOWN.items()}
    cos, sin = (cast(fx.Node, chain.key.node.args[i]).meta["val"].dtype for i in (1, 2))
    args = (
        empty([tokens, shape(chain.x)[-1]], chain.x.meta["val"].dtype), weights["weight_dq"], weights["weight_uq_qr"],
        match["w_uk"].meta["val"], weights["weight_dkv_kr"],
        *(cast(fx.Node, norm.args[1]).meta["val"] for norm in chain.norms),
        empty([tokens, rope], sin), empty([tokens, rope], cos),
        *(empty(_blocks(match, w), w.cache.meta["val"].dtype) for w in (chain.latent, chain.rope)),
    )
    kwargs = _attributes(chain) | {"cache_index": empty([tokens], torch.int64)}
    return illegal("npu_mla_prolog_v3", args, kwargs, match.anchor, ctx)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op and let the attention read its queries and caches."""
    chain = _chain(match)
    assert isinstance(chain, Chain)
    batch, _, queries, _ = _sizes(match)
    editor, tokens = ctx.editor, batch * queries
    for written in (chain.latent, chain.rope):
        rebind.rebind(ctx.program, editor, written.cache, _blocks(match, written))
    weights = {k: derived(ctx.program, editor, k, [chain.weights[k]], recipe, nz=True) for k, recipe in DOWN.items()}
    out = editor.call(
        torch.ops.npu.npu_mla_prolog_v3_functional.default,
        editor.reshape(chain.x, [tokens, shape(chain.x)[-1]]),
        weights["weight_dq"], weights["weight_uq_qr"], match["w_uk"], weights["weight_dkv_kr"],
        *(norm.args[1] for norm in chain.norms),
        *(_table(ctx, chain, i) for i in (2, 1)),
        chain.latent.cache, chain.rope.cache, cache_index=_slots(match, ctx, chain), **_attributes(chain),
    )
    query, query_rope, latent, rope = (editor.item(out, i) for i in (0, 1, 5, 6))
    attention = match.anchor
    attention.args = (query, *attention.args[1:])
    attention.kwargs = {**attention.kwargs, "query_rope": query_rope}
    rebind.update(editor, chain.latent.cache, chain.latent.new, latent)
    rebind.update(editor, chain.rope.cache, chain.rope.new, rope)


def _slots(match: Match, ctx: Context, chain: Chain) -> fx.Node:
    batch, _, queries, _ = _sizes(match)
    index = chain.latent.index
    if shape(index) != (batch * queries,):
        rows = math.prod(shape(chain.latent.new)) // shape(match["latents"])[-1]
        return positions.slots(ctx, index, batch, rows // batch)
    return index if index.meta["val"].dtype == torch.int64 else ctx.editor.call(
        aten._to_copy.default, index, dtype=torch.int64)


def _table(ctx: Context, chain: Chain, argument: int) -> fx.Node:
    """cos or sin as [T, 64]: both halves, one row per token, as the one head of the key is turned."""
    whole = doubled(ctx, cast(fx.Node, chain.key.node.args[argument]))
    size = (*shape(chain.key.node)[:-1], shape(whole)[-1])
    return ctx.editor.reshape(ctx.editor.expand(whole, size), [math.prod(size[:-1]), size[-1]])


RULE = Rule(
    name="mla_prolog",
    equation="rms(x W_DQ) W_UQ (W_UK | rope), cache[slot] = rms(x W_DKV) | rope  →  mla_prolog_v3(x, caches, slot)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel="npu_mla_prolog_v3",
    near=4,
)
