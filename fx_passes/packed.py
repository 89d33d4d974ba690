"""Prompts packed one behind the other: a mask by which each token sees its own prompt up to itself, proven.

    request = sum(index >= ends);  mask[i, j] = (request[i] == request[j]) & (i >= j)

The number of ends that a token has passed grows with its index whatever the ends are, so the tokens of one request
stand together, and the requests are what lies between the ends in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import fx

from cannopy.fx_passes import affine
from cannopy.fx_passes.affine import Affine
from cannopy.fx_passes.graph import aten, is_call, shape

VIEWS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.clone.default)


@dataclass(frozen=True)
class Packed:
    """Requests end before the tokens ``ends - shift``; ``ends`` is an integer tensor [R] in any order."""

    ends: fx.Node
    shift: int


def packed(node: object, tokens: int) -> Packed | None:
    """The ends of the requests of a mask over [.., tokens, tokens], None when it is not provably such a mask."""
    if not isinstance(node, fx.Node) or not _of_tokens(node, tokens):
        return None
    while is_call(node, *VIEWS):
        node = cast(fx.Node, node.args[0])
    if not is_call(node, aten.bitwise_and.Tensor, aten.logical_and.default) or not _of_tokens(node, tokens):
        return None
    for same, before in (node.args[:2], node.args[1::-1]):
        found = _same_request(same)
        if found is not None and _not_later(before):
            return found
    return None


def _of_tokens(node: fx.Node, tokens: int) -> bool:
    """[.., tokens, tokens] with dims of size 1 in front."""
    return shape(node)[-2:] == (tokens, tokens) and not set(shape(node)[:-2]) - {1}


def _not_later(node: object) -> bool:
    """i >= j"""
    found = affine.mask(node)
    return found is not None and found.terms == (Affine((0,) * (found.rank - 2) + (1, -1)),)


def _same_request(node: object) -> Packed | None:
    """request[i] == request[j]"""
    if not is_call(node, aten.eq.Tensor):
        return None
    sides = [affine.integer(side) for side in cast(fx.Node, node).args[:2]]
    rows = [side.rows for side in sides if side is not None and side == Affine(side.coefs, 0, (), side.rows)]
    if len(rows) != 2 or any(len(r) != 1 for r in rows) or any(any(s.coefs) for s in sides if s is not None):
        return None
    ((a, at), n), ((b, other), m) = (r[0] for r in rows)
    return _passed(a) if a is b and {at, other} == {-2, -1} and n == m == 1 else None


def _passed(node: fx.Node) -> Packed | None:
    """sum(index >= ends): how many requests end at or before each token."""
    if not is_call(node, aten.sum.dim_IntList) or node.args[1] not in ([-1], [1]) or len(node.args) > 2:
        return None
    condition = cast(fx.Node, node.args[0])
    found = affine.mask(condition) if len(shape(condition)) == 2 else None
    if found is None or len(found.terms) != 1 or found.terms[0].coefs != (1, 0):
        return None
    term = found.terms[0]
    ends = [(end, count) for end, count in _subtracted(term)]
    if len(ends) != 1 or ends[0][1] != -1:
        return None
    return Packed(ends[0][0], term.const)


def _subtracted(term: Affine) -> Iterator[tuple[fx.Node, int]]:
    yield from term.symbols
    for (row, axis), count in term.rows:
        yield row, count if axis == -1 else 0
