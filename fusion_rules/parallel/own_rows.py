"""Values of a prompt with the tokens of one rank only: what `context` and `sequence` do alike.

    f(x)  →  all_gather(f(x[own])),  f knows tokens apart

Operations that know tokens apart (norms, linears with whole weights, elementwise ones, experts) run on own rows, from
the embedding on. What needs all rows (caches, keys, results) reads gathered ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.parallel.collectives import all_gather
from cannopy.fusion_rules.parallel.heads import PRODUCT, ROTARY
from cannopy.fusion_rules.parallel.mixtures import FINALIZE, Mixture, mixtures, mlp
from cannopy.fusion_rules.parallel.places import SWIGLU, pointwise
from cannopy.fusion_rules.parallel.shards import Piece
from cannopy.fusion_rules.parallel.tokens import error, legal
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fusion_rules.rewrite.expert_calls import DROPPED
from cannopy.fx_passes.graph import aten, is_call, operator_named, shape
from cannopy.fx_passes.parallel import Group, ParallelError

Own = tuple[fx.Node, int]
"""A value of this rank's tokens and the dimension that they are in."""

Handler = Callable[[fx.Node], Own | None]
"""Gives the version of a node that has own rows, None where there is none."""

_FIRST = ("npu::npu_rms_norm", "cannopy::rms_norm", "npu::npu_moe_gating_top_k", SWIGLU)
"""Operators whose first operand has the tokens, which the last dimension is not."""


def row_of_tokens(work: Work, kind: str) -> int:
    """Tokens of the one row that the graph embeds. Raises `ParallelError` where there are several rows or sizes."""
    ids = {cast(fx.Node, n.args[1]) for n in work.editor.calls([aten.embedding.default])}
    tokens = {math.prod(shape(n)) for n in ids}
    if len(tokens) != 1 or any(shape(n)[:-1] != (1,) * (len(shape(n)) - 1) for n in ids):
        raise ParallelError(f"{kind}={work.layout.size(kind)}: one row of tokens is split, found "
                            f"{[list(shape(n)) for n in ids]}")
    return tokens.pop()


class OwnRows:
    """Splits ``tokens`` over the dies of ``group``; this rank's are ``segments`` of them.

    ``own``: this rank's version of nodes of the graph; ``stream``: nodes that are computed from embedded tokens;
    ``read``: nodes of which own versions read all rows.
    """

    def __init__(self, work: Work, kind: str, group: Group, tokens: int, segments: Sequence[Piece]) -> None:
        self.work, self.editor, self.kind, self.group = work, work.editor, kind, group
        self.tokens, self.segments = tokens, segments
        self.count = sum(stop - start for start, stop in segments)
        self.own: dict[fx.Node, Own] = {}
        self.stream: set[fx.Node] = set()
        self.read: list[fx.Node] = []
        self._routed: dict[fx.Node, Mixture] = {}
        self._chosen: dict[tuple[fx.Node, int], fx.Node] = {}

    def handlers(self) -> Mapping[Any, Handler]:
        """By target; a subclass adds its own."""
        named: dict[str, Handler] = {
            **dict.fromkeys(_FIRST, self._first), **dict.fromkeys(ROTARY, self._rotary),
            "npu::npu_add_rms_norm": self._added_norm, PRODUCT: self._product,
        }
        return {
            **{operator_named(name): handler for name, handler in named.items()},
            aten.linear.default: self._linear, aten.embedding.default: self._embedding, aten.cat.default: self._cat,
            aten.reshape.default: self._reshape, aten.slice.Tensor: self._slice, aten.permute.default: self._permute,
            aten._to_copy.default: self._elementwise, aten.native_layer_norm.default: self._layer_norm,
            aten.sum.dim_IntList: self._reduced, aten.mean.dim: self._reduced,
            operator.getitem: self.item,
        }

    def follow(self, node: fx.Node) -> bool:
        """Note what ``node`` is; whether own rows of it are wanted."""
        if not is_call(node, aten.embedding.default) and not any(n in self.stream for n in node.all_input_nodes):
            return False
        self.stream.add(node)
        return True

    def may_choose(self, node: fx.Node) -> bool:
        """Whether rows of ``node``, which has no own version, can be taken out of it: every rank has the same."""
        return node not in self.stream

    def in_order(self, rows: fx.Node) -> fx.Node:
        """The rows of all ranks, those of the first rank first, in the order of the prompt."""
        return rows

    def spread(self) -> None:
        """Give an own version to each node that can have one."""
        self._routed = {m.end: m for m in mixtures(self.work, self.kind)} if self.editor.calls([FINALIZE]) else {}
        handlers = self.handlers()
        for node in list(self.editor.graph.nodes):
            if node.op != "call_function" or not self.follow(node):
                continue
            handler = handlers.get(node.target, self._elementwise if pointwise(node) else None)
            with self.editor.before(node):
                if node in self._routed:
                    found = self._mixture(self._routed[node])
                else:
                    found = handler(node) if handler else None
            if found is not None:
                self.own[node] = found

    def gather(self, keys: Iterable[fx.Node] = ()) -> None:
        """Give all rows to what reads them: outputs, caches, ``keys`` and `read`. `ParallelError` for experts with no
        own version."""
        for end in self._routed:
            if end not in self.own:
                raise error(self.work.layout, self.kind, end, "these experts do not read rows of tokens, one each")
        ends = [n for n in self.editor.graph.nodes if n.op == "output" or is_call(n, aten.copy_.default)]
        todo, seen = [*(n for e in ends for n in e.all_input_nodes), *keys, *self.read], set[fx.Node]()
        while todo:
            node = todo.pop()
            if node not in seen and node in self.stream:
                seen.add(node)
                todo += [] if node in self.own else node.all_input_nodes
        for node in sorted(n for n in seen if n in self.own):
            with self.editor.before(node):
                self.editor.replace(node, self._gathered(*self.own[node]))

    def _gathered(self, own: fx.Node, dim: int) -> fx.Node:
        editor, size = self.editor, list(shape(own))
        if any(n != 1 for n in size[:dim]):
            raise error(self.work.layout, self.kind, own, f"tokens in dimension {dim} of {size} are not gathered")
        flat = all_gather(editor, editor.reshape(own, [self.count, *size[dim + 1 :]]), self.group)
        size[dim] = self.tokens
        return editor.reshape(self.in_order(flat), size)

    def part(self, node: fx.Node, dim: int) -> fx.Node | None:
        """``node`` with this rank's tokens in dimension ``dim``; None where that is not known."""
        own = self.own.get(node)
        if own is not None:
            return own[0] if own[1] == dim else None
        if not self.may_choose(node) or shape(node)[dim] != self.tokens:
            return None
        if (node, dim) not in self._chosen:
            parts = [self.editor.call(aten.slice.Tensor, node, dim, a, b) for a, b in self.segments]
            joined = parts[0] if len(parts) == 1 else self.editor.call(aten.cat.default, parts, dim)
            self._chosen[node, dim] = joined
            self.read.append(node)
        return self._chosen[node, dim]

    def at(self, node: fx.Node) -> int | None:
        """The dimension of ``node`` that has tokens, where its rows are known."""
        own = self.own.get(node)
        return None if own is None else own[1]

    def item(self, node: fx.Node) -> Own | None:
        """An output of an operator with several."""
        source, index = cast("tuple[fx.Node, int]", node.args)
        own = self.own.get(source)
        return None if own is None else (self.editor.item(own[0], index), own[1])

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
        dim = next((d for n in (x, residual) if (d := self.at(n)) is not None), None)
        both = None if dim is None else [self.part(n, dim) for n in (x, residual)]
        if both is None or dim is None or None in both or dim == len(shape(x)) - 1:
            return None
        return self.editor.call(node.target, *both, *node.args[2:], **node.kwargs), dim

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
        new[fits[0]] = self.count
        return self.editor.call(aten.reshape.default, self.own[x][0], new), fits[0]

    def _slice(self, node: fx.Node) -> Own | None:
        x, dim = cast("tuple[fx.Node, int]", (*node.args, 0)[:2])
        if self.at(x) in (None, dim % len(shape(x))):
            return None
        own, at = self.own[x]
        return self.editor.call(node.target, own, *node.args[1:], **node.kwargs), at

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

    def _reduced(self, node: fx.Node) -> Own | None:
        x, dims, keep = cast("tuple[fx.Node, list[int] | None, bool]", (*node.args, False)[:3])
        dim = self.at(x)
        over = [d % len(shape(x)) for d in dims or range(len(shape(x)))]
        if dim is None or dim in over:
            return None
        new = self.editor.call(node.target, self.own[x][0], *node.args[1:], **node.kwargs)
        return new, dim if keep else dim - sum(d < dim for d in over)

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
            legal(self.work, self.kind, node)
        return end, 0
