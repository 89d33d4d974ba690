"""What the operands of an attention are: parts put together along the head dim, repeated heads, rows of a cache.

Positions of elements are compared as strided views (`fx_passes.strides`), so that every spelling with the same
rearrangement counts: heads before or behind the tokens, one batch dim or packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fx_passes.affine import Causal, causal
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, where
from cannopy.fx_passes.packed import Packed, packed
from cannopy.fx_passes.strides import View, view

SWAP = [0, 2, 1, 3]
NAN_UNSEEN = 7
"""Place of that argument of `cannopy::attention`, which only attention that is written out has."""
INTEGERS = (torch.int64, torch.int32)
SUMS = (aten.add.Tensor, aten.sub.Tensor, aten.reshape.default, aten.expand.default, aten._to_copy.default)
WRAPS = (aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar, aten.fmod.Tensor, aten.bitwise_and.Scalar,
         aten.clamp.default, aten.clamp_max.default, aten.minimum.default, aten.where.self)
Visible = Causal | Packed | None
"""Which keys a query sees: those up to its own position, those of its own prompt up to itself, or all (None)."""


def visible(match: Match) -> Visible | Refusal:
    """What the mask of ``match``, an attention over [B, N, S, T], shows each query; a refusal when that is unproven."""
    mask, (batch, _, queries, _), keys = match["mask"], shape(match["q"]), shape(match["k"])[2]
    if mask is None:
        first = Causal(None, 0) if match["is_causal"] else None
        return first and (unseen(first, match.anchor, queries, keys) or first)
    if match["is_causal"]:
        return Refusal("the attention has a mask and is_causal at once", match.anchor, "mask", "one of both", "both",
                       "leave is_causal out where a mask is given")
    found = packed(mask, queries) if queries == keys and batch == 1 else None
    reason = found or causal(mask, queries, keys)
    if isinstance(reason, str):
        return Refusal(reason, mask, "mask", "a mask that is causal by position", describe(mask),
                       "leave the causal mask to the model: no padding, sliding window, bias or other mask on top")
    if isinstance(reason, Causal):
        return unseen(reason, mask, queries, keys) or without_keys(reason, match.anchor) or reason
    return reason


def without_keys(past: Causal, attention: fx.Node) -> Refusal | None:
    """The refusal of lengths that may leave a query of ``attention`` without a key, where that does not give zeros.

    The fused operators give zeros for such a query, and so does PyTorch's attention with a bool mask. A softmax over
    -inf is NaN, one over lowest numbers gives the mean of all values. Positions, of which each shows its own key, are
    taken to be 0 or more. Refused as well: lengths that may be larger than the number of keys, see `behind_the_last`.
    """
    refusal = behind_the_last(past, attention)
    if refusal is not None:
        return refusal
    mask = cast(fx.Node, attention.args[3])
    zeros = dtype(mask) == torch.bool and len(attention.args) < NAN_UNSEEN + 1
    if zeros or past.symbol is None or past.const >= 0:
        return None
    low = f"a length below {-past.const}"
    return Refusal(f"{low} leaves a query without a key, for which the model computes NaN or a mean of all values and "
                   "the fused attention zeros", mask, "mask", "key <= position, which shows each query its own key",
                   f"key < length ({past.symbol.name})", "compare keys with positions, or call "
                   "F.scaled_dot_product_attention with a bool mask, which gives zeros there")


def behind_the_last(past: Causal, attention: fx.Node) -> Refusal | None:
    """The refusal of positions that the graph wraps or cuts to the rows of a cache, as one that is written in a ring.

    Such positions go on behind the last key, where a mask shows all keys. The fused operators take lengths of at most
    the number of keys.
    """
    if past.symbol is None:
        return None
    keys = shape(cast(fx.Node, attention.args[1]))[2]
    place = _wrapped(past.symbol, keys)
    if place is None:
        return None
    found = f"{short(place.target)} at {where(place)}"
    return Refusal(f"the position is wrapped or cut to the rows of a cache ({found}), so it may lie behind the last of "
                   f"{keys} keys", place, "mask", f"positions below {keys}", found,
                   f"for one query compare keys with position.clamp(max={keys - 1})")


def _wrapped(position: fx.Node, keys: int) -> fx.Node | None:
    """What makes rows below ``keys`` of ``position`` or of sums with it, if something does."""
    pending, known = [position], {position}
    while pending:
        for user in pending.pop().users:
            if user in known or not is_call(user, *SUMS, *WRAPS) or dtype(user) not in INTEGERS:
                continue
            if is_call(user, *WRAPS):
                if _wraps(user, keys):
                    return user
                continue
            known.add(user)
            pending.append(user)
    return None


def _wraps(node: fx.Node, keys: int) -> bool:
    """Whether ``node`` may give a row for a position of ``keys`` or more; smaller bounds are those of blocks."""
    if is_call(node, aten.where.self):  # index_put counts negative rows from the end
        condition = node.args[0]
        return not (is_call(condition, aten.lt.Scalar) and condition.args[1] == 0)  # type: ignore[union-attr]
    if is_call(node, aten.clamp.default):
        bound = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    else:
        bound = node.args[1]
    return bound is not None and (not isinstance(bound, int) or bound >= keys - 1)


def unseen(past: Causal, mask: fx.Node, queries: int, keys: int) -> Refusal | None:
    """The refusal of a causal mask over [B, N, S, T] that lengths of the keys of each request cannot say."""
    if past.by_request and len(shape(mask)) != 4:
        return Refusal("the lengths in the mask are those of heads, not of requests", mask, "mask",
                       "a mask [B, 1, S, T]", describe(mask), "give the mask a dim of size 1 for the heads")
    if past.symbol is None and past.const < 0:
        return Refusal("the first query sees no key", mask, "mask", "key <= query + past, past >= 0",
                       f"past = {past.const}", "let each query see at least its own key")
    if past.symbol is None and past.const + queries > keys:
        return Refusal("the last queries stand behind the last key", mask, "mask",
                       f"past + {queries} queries <= {keys} keys", f"past = {past.const}",
                       "give as many keys as the last query may see")
    return None


@dataclass(frozen=True)
class Split:
    """A value that is ``parts`` side by side in its last dim; ``chain`` rearranges the other dims, outermost first."""

    parts: tuple[fx.Node, ...]
    chain: tuple[fx.Node, ...]

    def view(self, part: int) -> View | None:
        """The part as it stands in the value."""
        found: View | None = view(self.parts[part])
        for move in reversed(self.chain):
            if found is None:
                return None
            if is_call(move, aten.permute.default):
                found = found.permute(cast("list[int]", move.args[1]))
            else:
                found = found.reshape((*shape(move)[:-1], found.size[-1]))
        return found

    def emit(self, ctx: Context, part: int) -> fx.Node:
        """The node of the part as it stands in the value."""
        node = self.parts[part]
        for move in reversed(self.chain):
            if is_call(move, aten.permute.default):
                node = ctx.editor.call(aten.permute.default, node, move.args[1])
            else:
                node = ctx.editor.reshape(node, (*shape(move)[:-1], shape(node)[-1]))
        return node


def split(node: fx.Node) -> Split | None:
    """The two parts of a concatenation along the last dim behind permutes and reshapes that leave that dim alone."""
    chain: list[fx.Node] = []
    while is_call(node, aten.permute.default, aten.reshape.default):
        source = cast(fx.Node, node.args[0])
        kept = shape(source)[-1:] == shape(node)[-1:]
        if is_call(node, aten.permute.default):
            kept = cast("list[int]", node.args[1])[-1] == len(shape(node)) - 1
        if not kept:
            return None
        chain.append(node)
        node = source
    if not is_call(node, aten.cat.default) or node.args[1] not in (-1, len(shape(node)) - 1):
        return None
    parts = cast("Sequence[fx.Node]", node.args[0])
    return Split(tuple(parts), tuple(chain)) if len(parts) == 2 else None


def own_heads(node: fx.Node) -> fx.Node:
    """[B, K, T, D] where ``node`` [B, N, T, D] is each of its heads N / K times in a row, else ``node``."""
    if not is_call(node, aten.reshape.default):
        return node
    wide = node.args[0]
    if not is_call(wide, aten.expand.default):
        return node
    narrow = cast(fx.Node, cast(fx.Node, wide).args[0])
    if not is_call(narrow, aten.reshape.default):
        return node
    source = cast(fx.Node, narrow.args[0])
    size, repeated = shape(source), shape(cast(fx.Node, wide))
    if len(size) != 4 or shape(narrow) != (*size[:2], 1, *size[2:]) or len(repeated) != 5:
        return node
    groups = repeated[2]
    wanted = (size[0], size[1] * groups, *size[2:])
    return source if repeated == (*size[:2], groups, *size[2:]) and shape(node) == wanted else node


@dataclass(frozen=True)
class Cache:
    """Rows of requests in a cache: ``new`` is what it holds after this step's write.

    With ``table`` (the model's block table [B, blocks per request]) the rows of request b stand in blocks
    ``table[b]`` of ``block`` rows; without, they stand behind each other, request after request.
    """

    new: fx.Node
    table: fx.Node | None
    block: int


def cached(rows: View) -> Cache | None:
    """The cache whose rows a contiguous view [B, L, D] has, all of them in order; None when there is none."""
    batch, length, width = rows.size
    if not rows.matches(rows.size, (length * width, width, 1)):
        return None
    source = rows.source
    if is_call(source, aten.index_copy.default):
        whole = math.prod(shape(source)) == batch * length * width
        return Cache(source, None, 0) if whole else None
    if not is_call(source, aten.index.Tensor) or math.prod(shape(source)) != batch * length * width:
        return None
    pages, indices = cast(fx.Node, source.args[0]), cast("Sequence[object]", source.args[1])
    table = indices[0] if len(indices) == 1 else None
    if not isinstance(table, fx.Node) or len(shape(table)) != 2 or len(shape(pages)) < 3:
        return None
    blocks = shape(pages)
    if (shape(table)[0], shape(table)[1] * blocks[1], math.prod(blocks[2:])) != (batch, length, width):
        return None
    behind = view(pages)
    whole = behind == View.whole(behind.source).reshape(blocks)
    return Cache(behind.source, table, blocks[1]) if whole and is_call(behind.source, aten.index_copy.default) else None


def rows(ctx: Context, node: fx.Node, seen: View | None = None) -> fx.Node:
    """[B, N, S, D] as [B · S, N, D], cut from a value with the tokens first where it comes from one.

    ``seen`` is the view that ``node`` is, when that is known already.
    """
    batch, heads, tokens, dim = shape(node)
    found = seen or view(node)
    step = found.stride[1] if heads > 1 else 0
    wide = math.prod(shape(found.source))
    if step and wide == batch * tokens * heads * step and found.matches(
        (batch, heads, tokens, dim), (tokens * heads * step, step, heads * step, 1), found.offset
    ) and found.offset + dim <= step:
        whole = ctx.editor.reshape(found.source, [batch * tokens, heads, step])
        if step == dim:
            return whole
        return ctx.editor.call(aten.slice.Tensor, whole, 2, found.offset, found.offset + dim, 1)
    return ctx.editor.reshape(ctx.editor.call(aten.permute.default, node, SWAP), [batch * tokens, heads, dim])
