"""What integer and mask tensors hold, proven from the graph: affine functions of their indices.

An integer tensor is ``const + sum coef[d] * index[d] + sum symbol + sum row[index[axis]]``, a symbol being a tensor of
the graph with one element (a cache counter), a row one with one dim (lengths of requests). A mask is a conjunction of
inequalities ``affine >= 0``. Whatever is not provably of that form has no value here, so a padding mask, a window or a
custom mask is never taken for a causal one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import fx

from cannopy.fx_passes.graph import aten, is_call, shape
from cannopy.fx_passes.normalise.constants import constant
from cannopy.fx_passes.normalise.slices import bounds
from cannopy.fx_passes.normalise.views import permutation

VERY_NEGATIVE = -1e30
"""Models mask with -inf or with their dtype's lowest value; fp16's (-65504) is not enough beside large scores."""

INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Affine:
    """``const + sum(coefs[d] * index[d]) + sum(count * symbol) + sum(count * row[index[axis]])``, rank ``len(coefs)``.

    ``rows`` are ((row, axis), count); the axis counts from the last dim, which is -1.
    """

    coefs: tuple[int, ...]
    const: int = 0
    symbols: tuple[tuple[fx.Node, int], ...] = ()
    rows: tuple[tuple[tuple[fx.Node, int], int], ...] = ()

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """self + sign * other; ranks are aligned at the last dim as broadcasting does."""
        rank = max(len(self.coefs), len(other.coefs))
        a = (0,) * (rank - len(self.coefs)) + self.coefs
        b = (0,) * (rank - len(other.coefs)) + other.coefs
        return Affine(
            tuple(x + sign * y for x, y in zip(a, b, strict=True)), self.const + sign * other.const,
            _summed(self.symbols, other.symbols, sign), _summed(self.rows, other.rows, sign),
        )

    def aligned(self, rank: int) -> Affine:
        """The same over a tensor with more leading dims, ``rank`` in all."""
        return replace(self, coefs=(0,) * (rank - len(self.coefs)) + self.coefs)

    def minimum(self, size: tuple[int, ...]) -> int | None:
        """The smallest value over all indices of a tensor of ``size``; None when it depends on a symbol."""
        if self.symbols or self.rows:
            return None
        return self.const + sum(min(0, c * (n - 1)) for c, n in zip(self.coefs, size, strict=True))


Key = TypeVar("Key")


def _summed(a: Iterable[tuple[Key, int]], b: Iterable[tuple[Key, int]], sign: int) -> tuple[tuple[Key, int], ...]:
    """a + sign * b by key, without what cancels."""
    counts: Counter[Key] = Counter(dict(a))
    for key, count in b:
        counts[key] += sign * count
    return tuple((k, c) for k, c in counts.items() if c)


@dataclass(frozen=True)
class Mask:
    """True where every one of ``terms`` is >= 0."""

    rank: int
    terms: tuple[Affine, ...]


Value = Affine | Mask


def integer(node: object) -> Affine | None:
    """The affine form of an integer tensor or number."""
    value = _evaluate(node, {})
    return value if isinstance(value, Affine) else None


def mask(node: object) -> Mask | None:
    """The inequalities of a boolean tensor, without those that always hold."""
    value = _evaluate(node, {})
    if not isinstance(value, Mask) or not isinstance(node, fx.Node):
        return None
    size = shape(node)
    open_terms = []
    for term in value.terms:
        padded = term.aligned(len(size))
        low = padded.minimum(size)
        if low is None or low < 0:
            open_terms.append(padded)
    return Mask(len(size), tuple(dict.fromkeys(open_terms)))


@dataclass(frozen=True)
class Causal:
    """Key j is visible to query i where ``j <= i + past``, with ``past = symbol + const`` (symbol may be None).

    ``by_request``: the symbol has one number for each entry of the mask's first dim.
    """

    symbol: fx.Node | None
    const: int
    by_request: bool = False


def causal(node: object, queries: int, keys: int) -> Causal | str:
    """The causal form of a mask over [.., queries, keys], or the reason why it is not provably one.

    A mask with a broadcast query or key dim is refused: it is one row for all queries.
    """
    if isinstance(node, fx.Node) and shape(node)[-2:] != (queries, keys):
        return f"the mask has shape {list(shape(node))}, not one entry for each of {queries} queries and {keys} keys"
    found = mask(node)
    if found is None:
        return ("the mask is not provably causal by cache position (a padding or custom mask stays a tensor; "
                "leave attention_mask out where nothing is padded)")
    if len(found.terms) != 1:
        count = len(found.terms)
        return f"the mask has {count} conditions; a causal mask has one (a sliding window or a block mask has more)"
    term = found.terms[0]
    size = shape(cast(fx.Node, node))
    steps = tuple(c for c, n in zip(term.coefs[:-2], size[:-2], strict=True) if n != 1)
    query_step = term.coefs[-2] if size[-2] != 1 else 1
    given = [row for (row, axis), _ in term.rows if axis == -2]
    if given and not query_step:
        return (f"the positions of the queries are given ({given[0].name}): nothing proves that each is one more than "
                "the one before")
    if any(steps) or (query_step, term.coefs[-1]) != (1, -1):
        return f"the mask is not of the form key <= query + past (coefficients {term.coefs})"
    if len(term.symbols) + len(term.rows) > 1 or any(count != 1 for _, count in (*term.symbols, *term.rows)):
        return f"the mask depends on {len(term.symbols) + len(term.rows)} lengths"
    if term.rows:
        (row, axis), _ = term.rows[0]
        if axis != -len(size) or len(size) < 3:
            return f"the mask has a length for each entry of dim {len(size) + axis}, not for each request"
        return Causal(row, term.const, by_request=True)
    return Causal(term.symbols[0][0] if term.symbols else None, term.const)


def _evaluate(node: object, memo: dict[fx.Node, Value | None]) -> Value | None:
    if isinstance(node, bool):
        return Mask(0, () if node else (Affine((), -1),))
    if isinstance(node, int):
        return Affine((), node)
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node not in memo:
        memo[node] = None
        memo[node] = _indexed(_node(node, memo), shape(node))
    return memo[node]


def _indexed(value: Value | None, size: tuple[int, ...]) -> Value | None:
    """Without the coefficients of dims of size 1, whose only index is 0: such a dim may be broadcast."""
    if isinstance(value, Mask):
        terms = [t.aligned(len(size)) for t in value.terms]
        return Mask(len(size), tuple(replace(t, coefs=_varying(t.coefs, size)) for t in terms))
    return value and replace(value, coefs=_varying(value.coefs, size))


def _varying(coefs: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == 1 else c for c, n in zip(coefs, size, strict=True))


def _node(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    size, kind = shape(node), node.meta["val"].dtype
    if node.op == "call_function":
        for rule in (_source, _arithmetic, _comparison, _logic, _additive, _triangle, _moved):
            found = rule(node, memo)
            if found is not None:
                return found
    if kind in INTEGERS and math.prod(size) == 1:
        return Affine((0,) * len(size), 0, ((node, 1),))
    if kind in INTEGERS and len(size) == 1:
        return Affine((0,), 0, (), (((node, -1), 1),))
    return None


def _source(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    size, kind = shape(node), node.meta["val"].dtype
    if kind in INTEGERS and is_call(node, aten.arange.default):
        return Affine((1,))
    if kind in INTEGERS and is_call(node, aten.arange.start, aten.arange.start_step):
        start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
        return Affine((step,), start) if isinstance(start, int) and isinstance(step, int) else None
    if is_call(node, aten.full.default, aten.full_like.default, aten.new_full.default):
        fill = node.args[1] if is_call(node, aten.full.default, aten.full_like.default) else node.args[2]
        if kind is torch.bool:
            return Mask(len(size), () if fill else (Affine((0,) * len(size), -1),))
        return Affine((0,) * len(size), fill) if kind in INTEGERS and isinstance(fill, int) else None
    if is_call(node, aten.ones.default, aten.new_ones.default, aten.ones_like.default) and kind is torch.bool:
        return Mask(len(size), ())
    return None


def _arithmetic(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    if node.meta["val"].dtype not in INTEGERS or node.kwargs.get("alpha", 1) != 1:
        return None
    if is_call(node, aten.add.Tensor, aten.sub.Tensor):
        a, b = (_evaluate(x, memo) for x in node.args[:2])
        if isinstance(a, Affine) and isinstance(b, Affine):
            return a.plus(b, -1 if is_call(node, aten.sub.Tensor) else 1)
    if is_call(node, aten._to_copy.default):
        inner = _evaluate(node.args[0], memo)
        return inner if isinstance(inner, Affine) else None
    return None


def _comparison(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    greater = is_call(node, aten.ge.Tensor, aten.ge.Scalar, aten.gt.Tensor, aten.gt.Scalar)
    less = is_call(node, aten.le.Tensor, aten.le.Scalar, aten.lt.Tensor, aten.lt.Scalar)
    if not (greater or less):
        return None
    a, b = (_evaluate(x, memo) for x in node.args[:2])
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return None
    difference = a.plus(b, -1) if greater else b.plus(a, -1)
    strict = is_call(node, aten.gt.Tensor, aten.gt.Scalar, aten.lt.Tensor, aten.lt.Scalar)
    return Mask(len(shape(node)), (difference.plus(Affine((), 1), -1) if strict else difference,))


def _logic(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    if node.meta["val"].dtype is not torch.bool:
        return None
    if is_call(node, aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor):
        a, b = (_evaluate(x, memo) for x in node.args[:2])
        if isinstance(a, Mask) and isinstance(b, Mask):
            rank = len(shape(node))
            return Mask(rank, tuple(t.aligned(rank) for t in (*a.terms, *b.terms)))
    if is_call(node, aten.bitwise_not.default, aten.logical_not.default):
        return _negated(_evaluate(node.args[0], memo))
    return None


def _additive(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    """where(mask, 0, very negative), or zeros filled with it: the mask in the form that is added to scores."""
    if not node.meta["val"].dtype.is_floating_point:
        return None
    if is_call(node, aten._to_copy.default):
        source = cast(fx.Node, node.args[0])
        inner = _evaluate(source, memo) if source.meta["val"].is_floating_point() else None
        return inner if isinstance(inner, Mask) else None
    if is_call(node, aten.masked_fill.Scalar):
        kept, hidden, fill = node.args
        inner = _evaluate(hidden, memo) if constant(kept) == 0 and very_negative(fill) else None
        return _negated(inner)
    if not is_call(node, aten.where.self):
        return None
    condition, kept, dropped = node.args
    if constant(kept) != 0 or not very_negative(constant(dropped)):
        return None
    inner = _evaluate(condition, memo)
    return inner if isinstance(inner, Mask) else None


def _negated(value: Value | None) -> Mask | None:
    """True where the one condition of a mask is not."""
    if not isinstance(value, Mask) or len(value.terms) != 1:
        return None
    term = value.terms[0]
    return Mask(value.rank, (Affine((0,) * len(term.coefs), -1).plus(term, -1),))


def _triangle(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    """A triangle of ones or True, asked for with a cast to bool, ``== 0``, ``!= 0`` or by itself; or one of -inf."""
    size, kind = shape(node), node.meta["val"].dtype
    if kind.is_floating_point:
        inside = _inside(node) if very_negative(_filling(node)) else None
        return None if inside is None else _negated(Mask(len(size), (inside,)))
    if kind is not torch.bool:
        return None
    asked = is_call(node, aten._to_copy.default, aten.eq.Scalar, aten.ne.Scalar)
    if asked and not is_call(node, aten._to_copy.default) and node.args[1] != 0:
        return None
    triangle = cast(fx.Node, node.args[0]) if asked else node
    inside = _inside(triangle) if _filling(triangle) else None
    if inside is None:
        return None
    found = Mask(len(size), (inside,))
    return _negated(found) if is_call(node, aten.eq.Scalar) else found


def _inside(node: fx.Node) -> Affine | None:
    """Not negative in the triangle that tril or triu leaves of its operand; elsewhere the result is 0."""
    while is_call(node, aten._to_copy.default):
        node = cast(fx.Node, node.args[0])
    if not is_call(node, aten.tril.default, aten.triu.default):
        return None
    diagonal = node.args[1] if len(node.args) > 1 else 0
    lead = (0,) * (len(shape(node)) - 2)
    lower = is_call(node, aten.tril.default)
    return Affine((*lead, 1, -1), cast(int, diagonal)) if lower else Affine((*lead, -1, 1), -cast(int, diagonal))


def _filling(node: fx.Node) -> bool | int | float | None:
    """The number that a triangle is filled with, behind casts between floats."""
    if is_call(node, aten._to_copy.default):
        return _filling(cast(fx.Node, node.args[0])) if node.meta["val"].dtype.is_floating_point else None
    return constant(node.args[0]) if is_call(node, aten.tril.default, aten.triu.default) else None


def very_negative(value: object) -> bool:
    """Whether a number added to a score makes its softmax weight zero next to any score of a real model."""
    return isinstance(value, int | float) and value <= VERY_NEGATIVE


def _moved(node: fx.Node, memo: dict[fx.Node, Value | None]) -> Value | None:
    """reshape that only adds or drops dims of size 1, expand, permute, slice, select, clone."""
    moves = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
             aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int, aten.clone.default)
    if not is_call(node, *moves):
        return None
    source = cast(fx.Node, node.args[0])
    inner = _evaluate(source, memo)
    if isinstance(inner, Affine):
        return _move(node, source, inner)
    if isinstance(inner, Mask):
        terms = [_move(node, source, t.aligned(len(shape(source)))) for t in inner.terms]
        if all(t is not None for t in terms):
            return Mask(len(shape(node)), tuple(t for t in terms if t is not None))
    return None


def _move(node: fx.Node, source: fx.Node, value: Affine) -> Affine | None:
    old, new = shape(source), shape(node)
    coefs = value.coefs
    if is_call(node, aten.clone.default):
        return value
    if is_call(node, aten.slice.Tensor):
        dim, start, _, step = bounds(node)
        if (start, step, new[dim]) != (0, 1, old[dim]) and any(axis == dim - len(old) for (_, axis), _ in value.rows):
            return None
        scaled = tuple(c * step if d == dim else c for d, c in enumerate(coefs))
        return replace(value, coefs=scaled, const=value.const + coefs[dim] * start)
    if is_call(node, aten.expand.default):
        return replace(value, coefs=(0,) * (len(new) - len(old)) + coefs)
    shift = 0
    if is_call(node, aten.permute.default, aten.transpose.int):
        origins: list[int | None] = list(permutation(node))
    elif is_call(node, aten.select.int):
        dim = cast(int, node.args[1]) % len(old)
        origins = [d for d in range(len(old)) if d != dim]
        shift = coefs[dim] * (cast(int, node.args[2]) % old[dim])
    else:
        wide = [d for d, n in enumerate(old) if n != 1]
        if [old[d] for d in wide] != [n for n in new if n != 1]:
            return None
        left = iter(wide)
        origins = [None if n == 1 else next(left) for n in new]
    places = {d - len(old): at - len(new) for at, d in enumerate(origins) if d is not None}
    if any(axis not in places for (_, axis), _ in value.rows):
        return None
    rows = tuple(((row, places[axis]), count) for (row, axis), count in value.rows)
    return Affine(tuple(0 if d is None else coefs[d] for d in origins), value.const + shift, value.symbols, rows)
