"""The low-rank chains of MLA that npu_mla_prolog_v3 takes the place of, found upwards from absorbed queries and rows.

    q_c = rms(x W_DQ) γ_q;  q = q_c W_UQ;  query = q_nope W_UK;  query_rope = rope(q_pe)
    c, r = x W_DKV;  latent rows = rms(c) γ_kv;  rotated rows = rope(r)

Where elements come from is compared as strided views, so that heads may stand before or behind the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any as Anything
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Literal, Op, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.engine.spellings import RESHAPE, SWAP_HEADS, computed_weight
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fusion_rules.rewrite.attention_operands import SWAP
from cannopy.fx_passes.graph import aten, is_call, shape
from cannopy.fx_passes.strides import View, view
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

ABSORBED = Through(op(aten.permute.default, op(aten.matmul.default, Any("q_nope"), Any("w_uk")), SWAP_HEADS),
                   over=RESHAPE)
"""The queries of an attention to latents: [T, N, rank] with ``q_nope`` [B, N, S, nope]."""
DOWN = {"weight_dq": "w[0].t()", "weight_uq_qr": "w[0].t()", "weight_dkv_kr": "w[0].t()"}


def sparse(layout: str) -> Op:
    """The sparse attention over ``latents`` and ``ropes`` whose keys have ``layout``."""
    return op("npu::npu_sparse_flash_attention", ABSORBED, Any("latents"), Any("latents"), rest=True,
              query_rope=Any("q_rope"), key_rope=Any("ropes"), layout_kv=Literal(layout))


@dataclass(frozen=True)
class Turned:
    """A rotation of tokens [B, S, heads, D]: what is turned, and its tables [B, S, D / 2]."""

    node: fx.Node
    x: View
    tables: tuple[View, View]


@dataclass(frozen=True)
class Chain:
    """Everything that the operator takes the place of.

    ``norms`` of queries and latents, ``key`` the rotated rows, ``up`` the last projection of the queries, ``down``
    that of latents.
    """

    x: fx.Node
    weights: dict[str, fx.Node]
    norms: tuple[fx.Node, fx.Node]
    key: Turned
    up: fx.Node
    down: fx.Node

    @property
    def shares_norm(self) -> bool:
        """Whether something else reads the normalised latent of the queries (an indexer)."""
        readers = [u for n in self.norms[0].users for u in (n.users if is_call(n, aten.reshape.default) else (n,))]
        return any(u is not self.up for u in readers)


def sizes(match: Match) -> tuple[int, int, int, int]:
    """B, N, S and the width of a head of q without its rotated part."""
    batch, heads, queries, nope = shape(match["q_nope"])
    return batch, heads, queries, nope


def chain(match: Match, latent: fx.Node, rope: fx.Node) -> Chain | Refusal:
    """The chains of ``match``, whose latent and rotated rows [T, ·] are ``latent`` and ``rope``."""
    batch, heads, queries, nope = sizes(match)
    tokens, rank, width = batch * queries, shape(match["latents"])[-1], shape(match["q_rope"])[-1] + nope
    up = view(match["q_nope"])
    steps = (queries * heads * width, width, heads * width, 1)
    turned = _turned(match["q_rope"], (batch, queries, heads, width - nope))
    if not is_call(up.source, aten.linear.default) or not up.matches((batch, heads, queries, nope), steps):
        return chain_refusal(match["q_nope"], "the queries are not the first part of each head of one projection")
    if turned is None or turned.x.source is not up.source or not turned.x.matches(
            (batch, queries, heads, width - nope), (queries * heads * width, heads * width, width, 1), nope):
        return chain_refusal(
            match["q_rope"], "the rotated queries are not the second part of each head of that projection")
    norm = view(latent).reshape((tokens, rank))
    key = _turned(rope, (batch, queries, 1, width - nope))
    if norm is None or not _named(norm.source, "rms_norm") or norm != View.whole(norm.source).reshape((tokens, rank)):
        return chain_refusal(latent, "the latent cache does not take a normalised latent")
    if key is None or key.tables != turned.tables:
        return chain_refusal(rope, "the rope cache does not take a part that is rotated as the queries are")
    return _down(match, up.source, norm.source, key, tokens)


def _down(match: Match, up: fx.Node, norm: fx.Node, key: Turned, tokens: int) -> Chain | Refusal:
    """The projections that both chains start with."""
    rank, rope = shape(match["latents"])[-1], shape(match["q_rope"])[-1]
    latent = view(cast(fx.Node, norm.args[0])).reshape((tokens, rank))
    turned = key.x.reshape((tokens, rope))
    down = latent.source if latent is not None else norm
    if latent is None or turned is None or turned.source is not down or not is_call(down, aten.linear.default) or not (
        latent.matches((tokens, rank), (rank + rope, 1)) and turned.matches((tokens, rope), (rank + rope, 1), rank)
    ):
        return chain_refusal(norm, "latent and rotated part are not the first and the second part of one projection")
    low = behind(up.args[0])
    if not _named(low, "rms_norm"):
        return chain_refusal(up, f"the queries come from {describe(low)}, not from a normalised low-rank latent")
    first = behind(cast(fx.Node, low).args[0])
    if not is_call(first, aten.linear.default):
        return chain_refusal(
            cast(fx.Node, low),
            "the normalised latent of the queries is not that of a projection, as it is with q_lora_rank")
    linears = cast("tuple[fx.Node, ...]", (first, up, down))
    biased = next((linear for linear in linears if len(linear.args) > 2), None)
    if biased is not None:
        return Refusal("a projection has a bias, which the operator does not add", biased, "operand",
                       "projections without bias", describe(biased), "drop the bias (attention_bias=False)")
    inputs = [behind(linear.args[0]) for linear in (linears[0], linears[2])]
    if inputs[0] is not inputs[1]:
        return chain_refusal(down, "the query and the key/value chain read different hidden states")
    weights = dict(zip(DOWN, (cast(fx.Node, linear.args[1]) for linear in linears), strict=True))
    return Chain(cast(fx.Node, inputs[0]), weights, (cast(fx.Node, low), norm), key, up, down)


def chain_refusal(node: fx.Node, reason: str) -> Refusal:
    """Something of the chains is not as the operator computes it."""
    return Refusal(reason, node, "operand", "the chains of MLA: low-rank projections, norms, rotation, cache write",
                   describe(node), "write the attention as DeepSeek does, with q_lora_rank and no factor in between")


def _named(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and str(node.target) == f"cannopy.{name}.default"


def behind(node: object) -> object:
    """What ``node`` is a reshape of."""
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


def computed(match: Match, ctx: Context, found: Chain) -> Refusal | None:
    """A refusal when a weight is not one that can be laid out anew at load time."""
    for name, weight in {**found.weights, "weight_uk": match["w_uk"]}.items():
        reason = why_not_weight(ctx.program, weight)
        if reason is not None:
            return computed_weight(name, weight, reason)
    return None


def not_legal(match: Match, ctx: Context, found: Chain, caches: Sequence[torch.Tensor], mode: str,
              index: torch.Tensor | None = None, given: Mapping[str, fx.Node] | None = None) -> Refusal | None:
    """The refusal of the operator's contract for ``caches`` (latents, rotated parts) in ``mode``.

    ``given`` are the nodes of the caches by argument, where a refusal can point at them.
    """
    batch, _, queries, _ = sizes(match)
    tokens, rope, empty = batch * queries, shape(match["q_rope"])[-1], ctx.editor.empty
    weights = {k: preview(ctx.editor, [found.weights[k]], recipe) for k, recipe in DOWN.items()}
    cos, sin = (cast(fx.Node, found.key.node.args[i]).meta["val"].dtype for i in (1, 2))
    args = (
        empty([tokens, shape(found.x)[-1]], found.x.meta["val"].dtype), weights["weight_dq"], weights["weight_uq_qr"],
        match["w_uk"].meta["val"], weights["weight_dkv_kr"],
        *(cast(fx.Node, norm.args[1]).meta["val"] for norm in found.norms),
        empty([tokens, rope], sin), empty([tokens, rope], cos), *caches,
    )
    tables = cast("tuple[fx.Node, ...]", found.key.node.args[1:3])
    gammas = [cast(fx.Node, norm.args[1]) for norm in found.norms]
    nodes = {"token_x": found.x, "weight_uk": match["w_uk"], "rmsnorm_gamma_cq": gammas[0],
             "rmsnorm_gamma_ckv": gammas[1], "rope_cos": tables[0], "rope_sin": tables[1], **found.weights,
             **(given or {})}
    kwargs = _attributes(found, mode) | {"cache_index": index}
    return illegal("npu_mla_prolog_v3", args, kwargs, found.down, ctx, nodes)


def _attributes(found: Chain, mode: str) -> dict[str, Anything]:
    eps = [float(cast(float, norm.args[2])) for norm in found.norms]
    flag = {"query_norm_flag": True} if found.shares_norm else {}
    return {"rmsnorm_epsilon_cq": eps[0], "rmsnorm_epsilon_ckv": eps[1], "cache_mode": mode, **flag}


def emit(match: Match, ctx: Context, found: Chain, caches: Sequence[fx.Node], mode: str,
         index: fx.Node | None = None) -> tuple[fx.Node, fx.Node]:
    """Emit the operator; the attention reads its queries, all others its normalised latent. Returns the new caches."""
    batch, _, queries, _ = sizes(match)
    editor, tokens = ctx.editor, batch * queries
    weights = {k: derived(ctx.program, editor, k, [found.weights[k]], recipe, nz=True) for k, recipe in DOWN.items()}
    attributes = _attributes(found, mode)
    written = {} if index is None else {"cache_index": index}
    out = editor.call(
        torch.ops.npu.npu_mla_prolog_v3_functional.default,
        editor.reshape(found.x, [tokens, shape(found.x)[-1]]),
        weights["weight_dq"], weights["weight_uq_qr"], match["w_uk"], weights["weight_dkv_kr"],
        *(norm.args[1] for norm in found.norms), *(_table(ctx, found, i) for i in (2, 1)), *caches,
        **written, **attributes,
    )
    attention = match.anchor
    attention.args = (editor.item(out, 0), *attention.args[1:])
    attention.kwargs = {**attention.kwargs, "query_rope": editor.item(out, 1)}
    if found.shares_norm:
        low = found.norms[0]
        editor.replace(low, editor.reshape(editor.item(out, 3), shape(low)))
    return editor.item(out, 5), editor.item(out, 6)


def _table(ctx: Context, found: Chain, argument: int) -> fx.Node:
    """cos or sin as [T, 64]: both halves, one row per token, as the one head of the key is turned."""
    whole = doubled(ctx, cast(fx.Node, found.key.node.args[argument]))
    size = (*shape(found.key.node)[:-1], shape(whole)[-1])
    return ctx.editor.reshape(ctx.editor.expand(whole, size), [math.prod(size[:-1]), size[-1]])
