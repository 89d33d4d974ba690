"""Named places of the fused patterns: the values inside of them, and who reads each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from cannopy.fx_passes.graph import aten, is_call
from cannopy.fx_passes.program import Program
from tests.mutation.attention import attentions
from tests.mutation.caches import writes
from tests.mutation.experts import routed
from tests.mutation.indexer import indexers
from tests.mutation.mlps import glus, halves, mlps
from tests.mutation.norms import norms
from tests.mutation.operators import calls, floating, through, user
from tests.mutation.residuals import residuals
from tests.mutation.rope import ropes
from tests.mutation.router import routers

VIEWS = (aten.reshape.default, aten.permute.default, aten.expand.default)


@dataclass(frozen=True)
class Place:
    """The value ``node`` as ``readers`` see it."""

    name: str
    node: fx.Node
    readers: tuple[fx.Node, ...]


def _place(name: str, node: Any, readers: list[fx.Node] | None = None) -> Iterator[Place]:
    if isinstance(node, fx.Node) and floating(node):
        yield Place(name, node, tuple(node.users if readers is None else readers))


def norm_places(p: Program) -> list[Place]:
    """The input (as statistics, product or both read it), the statistics, the factor, the result before and after
    gamma, and gamma."""
    found: list[Place] = []
    for n in norms(p):
        both = [n.square, n.normed]
        for readers in (both, both[:1], both[1:]):
            found += _place("norm input", n.wide, readers)
        for name in ("square", "mean", "plus", "rsqrt", "normed", "scaled"):
            found += _place(f"norm {name}", getattr(n, name))
        if n.rounded is not n.normed:
            found += _place("norm rounded", n.rounded)
        found += _place("norm gamma", n.gamma, [n.scaled])
    return found


def residual_places(p: Program) -> list[Place]:
    """The sum as the norm and the stream read it."""
    found: list[Place] = []
    for r in residuals(p):
        norm = [u for u in r.total.users if u in (r.norm.wide, r.norm.square, r.norm.normed)]
        stream = [u for u in r.total.users if u not in norm]
        for readers in (norm, stream, norm + stream):
            if readers:
                found += _place("residual", r.total, readers)
    return found


def branch_places(p: Program) -> list[Place]:
    """The terms of the sums, as the sums read them."""
    return [place for r in residuals(p) for a in r.total.args for place in _place("residual term", a, [r.total])]


def rope_places(p: Program) -> list[Place]:
    """Angles, tables, the rotated tensor, its parts, the products and the result."""
    found: list[Place] = []
    for table in calls(p, aten.cos.default, aten.sin.default):
        found += [*_place("rope angles", table.args[0]), *_place("rope table", table)]
    for r in ropes(p):
        found += _place("rope cos", r.cos, r.cos_products)
        found += _place("rope sin", r.sin, r.sin_products)
        found += _place("rope input", r.x)
        for node in (*r.parts, *r.cos_products, *r.sin_products, r.out, r.turned):
            found += _place("rope part", node)
    return found


def router_places(p: Program) -> list[Place]:
    """Scores, biased and masked scores, sums of groups, weights before and after normalisation."""
    names = ("scores", "biased", "masked", "grouped", "group_sum", "picked", "total", "eps", "div", "scaled")
    found: list[Place] = []
    for r in routers(p):
        for name in names:
            found += _place(f"router {name}", getattr(r, name))
        if r.biased is not None:
            found += _place("router scores of the choice", r.scores, [r.biased])
            found += _place("router scores of the weights", r.scores, [r.picked])
            found += _place("router bias", r.biased.args[1], [r.biased])
    return found


def logit_places(p: Program) -> list[Place]:
    """What the router's activation reads."""
    return [q for r in routers(p) for q in _place("router logits", r.logits, [r.scores])]


def expert_places(p: Program) -> list[Place]:
    """Rows, products, gated products, weighted results and their sum, for both forms of experts."""
    found: list[Place] = []
    for r in routed(p):
        for name in ("rows", "first", "second", "scale", "weighted", "unsorted", "total", "result"):
            found += _place(f"experts {name}", getattr(r, name))
    for g in halves(p):
        down = next(iter(through_views(g.product)))
        if is_call(down, aten.matmul.default):  # batched
            weighted = user(next(iter(down.users)), aten.mul.Tensor)
            total = user(user(weighted, aten.reshape.default), aten.sum.dim_IntList)
            scale = next(a for a in weighted.args if a is not next(iter(down.users)))  # type: ignore[union-attr]
            for name, node in (("result", down), ("weighted", weighted), ("total", total), ("scale", scale),
                               ("first", through(g.gate, aten.slice.Tensor, *VIEWS))):
                found += _place(f"experts {name}", node)
    return found


def through_views(node: fx.Node) -> list[fx.Node]:
    """What reads ``node`` behind reshapes."""
    return [m for u in node.users for m in (through_views(u) if is_call(u, *VIEWS) else [u])]


def glu_places(p: Program) -> list[Place]:
    """Gate, up, the activated gate and the product of MLPs and of experts."""
    found: list[Place] = []
    for g in glus(p):
        found += _place("glu gate", g.gate, [g.silu])
        found += _place("glu up", g.up, [g.product])
        found += _place("glu silu", g.silu, [g.product])
        found += _place("glu product", g.product)
    for g in mlps(p):
        linear: Any = g.gate
        for readers in ([g.gate], [g.up], [g.gate, g.up]):
            found += _place("mlp input", linear.args[0], readers)
    return found


def attention_places(p: Program) -> list[Place]:
    """Queries, keys, values and result; where attention is written out, the scores and weights as well."""
    found: list[Place] = []
    for n in attentions(p):
        for name, node in zip(("queries", "keys", "values"), n.args[:3], strict=True):
            found += _place(f"attention {name}", node, [n])
        found += _place("attention result", n)
    for softmax in calls(p, aten._softmax.default):
        chain = [softmax, *_scores(softmax)]
        if not is_call(chain[-1], aten.matmul.default):  # a router
            continue
        for node in chain:
            found += _place("attention scores or weights", node)
        product: Any = chain[-1]
        for node in product.args:
            found += _place("attention queries or keys", node, [product])
        readers = through_views(softmax)
        last: Any = next(iter(u for r in readers for u in (r, *r.users) if is_call(u, aten.matmul.default)), None)
        if last is not None:
            found += _place("attention values", last.args[1], [last])
            found += _place("attention result", last)
    return found


def _scores(softmax: fx.Node) -> list[fx.Node]:
    """From the softmax's input back to the product of queries and keys."""
    found: list[fx.Node] = [softmax.args[0]]  # type: ignore[list-item]
    steps = (aten._to_copy.default, aten.add.Tensor, aten.mul.Tensor, aten.masked_fill.Scalar, *VIEWS)
    while is_call(found[-1], *steps):
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


def indexer_places(p: Program) -> list[Place]:
    """Queries, keys, products, weights of heads, scores before and after the mask."""
    found: list[Place] = []
    for i in indexers(p):
        for node in i.products.args:
            found += _place("indexer queries or keys", node, [i.products])
        for name in ("products", "scaled", "relu", "weights", "scores", "masked"):
            found += _place(f"indexer {name}", getattr(i, name))
    return found


def cache_places(p: Program) -> list[Place]:
    """What is written, what is read within the step and what is kept."""
    found: list[Place] = []
    for w in writes(p):
        found += _place("cache value", w.value, [w.node])
        found += _place("cache as read", w.node, w.readers)
        found += _place("cache as kept", w.node, [w.back])
    return found
