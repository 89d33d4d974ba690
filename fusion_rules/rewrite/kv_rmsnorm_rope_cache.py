"""The key side of MLA, where the prolog takes none of it  →  npu_kv_rmsnorm_rope_cache_v2_functional.

    c, r = kv;  latent cache[slot] = rms(c) γ;  rope cache[slot] = rope(r)

It starts at the write of the rotated part and finds the other write at the same places of its cache. What the model
reads of the step's own rows (prompts attend to them, not to the cache) comes out of the op as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Number, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import INTERLEAVED, RESHAPE
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.lift.halves import doubled
from cannopy.fusion_rules.rewrite import positions
from cannopy.fx_passes import rebind
from cannopy.fx_passes.graph import aten, is_call, shape
from cannopy.fx_passes.strides import View, view

OP = "npu_kv_rmsnorm_rope_cache_v2_functional"
PART = Through(op(aten.slice.Tensor, op(aten.linear.default, Any(), Any(), rest=True), Any(), Any(), Any(), Any()),
               over=RESHAPE, name="pe")
PATTERN = op(
    aten.index_copy.default,
    Any("rope_base"),
    Number("dim"),
    Any("index"),
    Through(op("cannopy::rotary", PART, Any("cos"), Any("sin"), INTERLEAVED, name="rotated"), over=RESHAPE),
)


@dataclass(frozen=True)
class Writes:
    """Both writes of one step of T tokens in B requests: ``kv`` [.., 576], its norm, and the caches before them."""

    kv: fx.Node
    norm: fx.Node
    latent: fx.Node
    caches: tuple[fx.Node, fx.Node]
    batch: int
    tokens: int


def _writes(match: Match) -> Writes | Refusal:
    size, dim = shape(match.anchor), match["dim"] % len(shape(match.anchor))
    batch = math.prod(size[:dim])
    tokens, rope = batch * shape(match["index"])[0], math.prod(size[dim + 1 :])
    places = (batch, size[dim])
    part = view(match["pe"]).reshape((tokens, rope))
    for other in match["index"].users:
        if is_call(other, aten.index_copy.default) and other is not match.anchor and other.args[2] is match["index"]:
            found = _latent(other, part, places, tokens, match["rope_base"])
            if found is not None:
                return found
    return _writes_refusal(
        match.anchor, "no normalised latent of the same projection is written to a cache at the same rows")


def _latent(write: fx.Node, part: View | None, places: tuple[int, int], tokens: int, base: fx.Node) -> Writes | None:
    """The write of the latent that stands in front of ``part`` in one projection, into a cache of as many requests and
    rows of each, ``places``."""
    value, size, dim = cast(fx.Node, write.args[3]), shape(write), cast(int, write.args[1]) % len(shape(write))
    if (math.prod(size[:dim]), size[dim]) != places:
        return None
    rank = math.prod(shape(value)) // tokens
    rows = view(value).reshape((tokens, rank))
    norm = rows.source if rows is not None else value
    if part is None or rows is None or str(norm.target) != "cannopy.rms_norm.default":
        return None
    if math.prod(shape(norm)) != tokens * rank:
        return None
    latent = view(cast(fx.Node, norm.args[0])).reshape((tokens, rank))
    wide = rank + part.size[1]
    whole = rows == View.whole(norm).reshape((tokens, rank)) and latent is not None and latent.source is part.source
    if not whole or latent is None or math.prod(shape(part.source)) != tokens * wide:
        return None
    if not latent.matches((tokens, rank), (wide, 1)) or not part.matches(part.size, (wide, 1), rank):
        return None
    caches = _behind(base), _behind(cast(fx.Node, write.args[0]))
    return Writes(part.source, norm, write, caches, places[0], tokens)


def _behind(node: fx.Node) -> fx.Node:
    while is_call(node, aten.reshape.default):
        node = cast(fx.Node, node.args[0])
    return node


def _writes_refusal(node: fx.Node, reason: str) -> Refusal:
    return Refusal(reason, node, "operand", "rms_norm of the first and rotation of the second part of one projection",
                   describe(node), "write latent and rotated part of the projection at the same rows of two caches")


def _blocks(match: Match, ctx: Context, found: Writes) -> list[list[int]] | str:
    """The caches as blocks [blocks, rows, 1, D]: those of the model, or those that divide a static cache."""
    sizes = [shape(cache) for cache in found.caches]
    widths = [math.prod(shape(n)) // found.tokens for n in (match["rotated"], found.norm)]
    rows = [math.prod(s) // w for s, w in zip(sizes, widths, strict=True)]
    if all(len(s) == 4 and s[2:] == (1, w) for s, w in zip(sizes, widths, strict=True)) and sizes[0][1] > 1:
        block: int | str = sizes[0][1]
    else:
        block = positions.block_size(rows[0] // found.batch, ctx.block_size)
    if isinstance(block, str):
        return block
    return [[n // block, block, 1, w] for n, w in zip(rows, widths, strict=True)]


def check(match: Match, ctx: Context) -> Refusal | None:
    """Both writes are of one projection, into graph inputs that are written back, within the contract."""
    found = _writes(match)
    if isinstance(found, Refusal):
        return found
    blocks = _blocks(match, ctx, found)
    if isinstance(blocks, str):
        return positions.block_refusal(blocks, match.anchor, math.prod(shape(found.caches[0])[:-1]) // found.batch)
    for cache, size in zip(found.caches, blocks, strict=True):
        reason = rebind.why_not(ctx.program, cache, size)
        if reason is None and rebind.write_of(cache) is None:
            reason = f"{cache.name} is not written back"
        if reason is not None:
            return Refusal(f"cache: {reason}", match.anchor, "cache",
                           "two caches that are graph inputs, written once and read after that", reason,
                           "pass the caches and write each once per call, before the attention reads it")
    empty, kind = ctx.editor.empty, found.kv.meta["val"].dtype
    table = [1, 1, found.tokens, 2 * shape(match["cos"])[-1]]
    args = (empty([1, 1, found.tokens, shape(found.kv)[-1]], kind), cast(fx.Node, found.norm.args[1]).meta["val"],
            *(empty(table, match[name].meta["val"].dtype) for name in ("cos", "sin")),
            empty([found.tokens], torch.int64),
            *(empty(size, cache.meta["val"].dtype) for cache, size in zip(found.caches, blocks, strict=True)))
    return illegal(OP, args, {"cache_mode": "PA_BNSD"}, match.anchor, ctx)


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op; the caches and what else reads the step's rows take its outputs."""
    found = _writes(match)
    assert isinstance(found, Writes)
    blocks = _blocks(match, ctx, found)
    assert not isinstance(blocks, str)
    editor, tokens, rotated = ctx.editor, found.tokens, match["rotated"]
    read = [_read(rotated, match.anchor), _read(found.norm, found.latent)]
    index = match["index"] if shape(match["index"]) == (tokens,) else positions.slots(
        ctx, match["index"], found.batch, shape(match.anchor)[match["dim"]])
    if index.meta["val"].dtype != torch.int64:
        index = editor.call(aten._to_copy.default, index, dtype=torch.int64)
    for cache, size in zip(found.caches, blocks, strict=True):
        rebind.rebind(ctx.program, editor, cache, size)
    out = editor.call(
        torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional.default,
        editor.reshape(found.kv, [1, 1, tokens, shape(found.kv)[-1]]), found.norm.args[1],
        *(_table(ctx, rotated, match[name], tokens) for name in ("cos", "sin")), index, *found.caches,
        epsilon=float(cast(float, found.norm.args[2])), cache_mode="PA_BNSD", is_output_kv=any(read),
    )
    for i, (node, wanted) in enumerate(zip((rotated, found.norm), read, strict=True)):
        if wanted:
            editor.replace(node, editor.reshape(editor.item(out, i), shape(node)))
    rebind.update(editor, found.caches[0], match.anchor, editor.item(out, 2))
    rebind.update(editor, found.caches[1], found.latent, editor.item(out, 3))


def _read(node: fx.Node, write: fx.Node) -> bool:
    """Whether anything but ``write`` reads ``node``, through reshapes."""
    return any(user is not write and not (is_call(user, aten.reshape.default) and not _read(user, write))
               for user in node.users)


def _table(ctx: Context, rotated: fx.Node, half: fx.Node, tokens: int) -> fx.Node:
    """cos or sin as [1, 1, T, 64]: both halves, one row per token."""
    whole = doubled(ctx, half)
    size = (*shape(rotated)[:-1], shape(whole)[-1])
    return ctx.editor.reshape(ctx.editor.expand(whole, size), [1, 1, tokens, size[-1]])


RULE = Rule(
    name="kv_rmsnorm_rope_cache",
    equation="cache[slot] = rms(c) γ, cache[slot] = rotary(r)  →  kv_rmsnorm_rope_cache_v2(c | r, caches, slot)",
    pattern=PATTERN,
    check=check,
    rewrite=rewrite,
    kernel=OP,
    near=NEVER,
)
