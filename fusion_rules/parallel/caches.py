"""cache[slot] = key(heads)  →  cache_r[slot] = key(heads r): the caches of a rank hold its heads of keys and values.

A cache is an argument of the call that the graph writes. The graph of one rank is called with a part of it; what reads
the cache and what is written into it have that part as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from cannopy.fusion_rules.parallel.narrow import Handler, Narrow, Pieces, reshaped
from cannopy.fusion_rules.parallel.shards import PART
from cannopy.fusion_rules.parallel.tokens import error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, is_call, operator_named, shape
from cannopy.fx_passes.program import Held
from cannopy.fx_passes.rebind import write_of
from cannopy.fx_passes.weight_plan import why_not_weight

KIND = "attn_tp"
NORM, DIALECT_NORM = "npu::npu_rms_norm", "cannopy::rms_norm"
_WRITES: dict[Any, int] = {aten.index_copy.default: 3, aten.slice_scatter.default: 1, aten.index_put.default: 2}
"""Writes into what the first argument is, and the place of what is written."""


@dataclass
class Caches:
    """The caches that are cut: the new placeholder of each, and which heads it holds."""

    work: Work
    parts: dict[fx.Node, tuple[fx.Node, Held]] = field(default_factory=dict)

    def handlers(self) -> dict[Any, Handler]:
        """Of caches, of what writes them and reads rows of them, and of norms of each head."""
        found: dict[Any, Handler] = {
            "placeholder": self.input, aten.index_copy.default: _copied, aten.slice_scatter.default: _copied,
            aten.index_put.default: _put, aten.index.Tensor: _rows,
        }
        norms = {operator_named(NORM): _norm, operator_named(DIALECT_NORM): _norm}
        return found | {target: handler for target, handler in norms.items() if target is not None}

    def input(self, narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
        """The part of a weight, or the placeholder of the rank's part of a cache."""
        program, editor = self.work.program, self.work.editor
        if why_not_weight(program, node) is None:
            return narrow.weight(node, dim, pieces)
        spec, (start, stop) = program.spec(node.name), (pieces[0][0], pieces[-1][1])
        self._may_be_cut(narrow, node)
        held = Held(dim, start, stop, spec.shape[dim])
        if node in self.parts:
            new, known = self.parts[node]
            if held != known:
                raise narrow.error(node, f"{spec.source} is cut in two ways: {known} and {held}")
            return new
        own = spec.part(held)
        value = editor.fake(lambda: torch.empty_strided(own.shape, own.stride, dtype=own.dtype,
                                                        device=node.meta["val"].device))
        new = editor.placeholder(f"{node.name}_part", value)
        node.prepend(new)
        self.parts[node] = new, held
        return new

    def _may_be_cut(self, narrow: Narrow, node: fx.Node) -> None:
        spec = self.work.program.spec(node.name)
        if narrow.kind != KIND:
            raise narrow.error(node, f"{spec.source} holds heads of keys, which {narrow.kind} does not cut: it is for "
                                     "caches of latents")
        if not spec.mutated or spec.view is not None:
            raise narrow.error(node, f"{spec.source} has heads in {list(shape(node))} and is neither a parameter nor "
                                     "a cache that the model writes: it cannot be cut")
        if spec.source.startswith("self"):
            raise narrow.error(node, f"the cache {spec.source} belongs to the model, which all ranks call whole: pass "
                                     "caches as arguments of the method")
        for kind, leaf in self.work.program.output.leaves:
            if kind == "view" and leaf[0] == spec.source:
                raise narrow.error(node, f"a view of the cache {spec.source} is a result, which would be a part of it")

    def write(self, narrow: Narrow) -> None:
        """Write the parts: what was cut and goes into a cache takes that cache with it."""
        for node, dim, pieces in list(narrow.cuts()):
            for user in node.users:
                if user not in narrow.seen:
                    self._follow(narrow, node, user, dim, pieces)
        for cache, (new, held) in self.parts.items():
            copy = write_of(cache)
            if copy is not None:
                value = narrow.of(cast(fx.Node, copy.args[1]), held.dim, [(held.start, held.stop)])
                copy.args, copy.meta["val"] = (new, value, *copy.args[2:]), new.meta["val"]

    def _follow(self, narrow: Narrow, node: fx.Node, user: fx.Node, dim: int, pieces: Pieces) -> None:
        """Cut the caches that ``user``, which reads what was cut in ``node``, leads to."""
        if is_call(user, aten.copy_.default):
            if user.args[1] is node:
                narrow.of(cast(fx.Node, user.args[0]), dim, pieces)
            return
        found = _behind(node, user, dim, pieces)
        if found is not None:
            for reader in user.users:
                self._follow(narrow, user, reader, *found)

    def finish(self) -> None:
        """Put the parts in the place of the caches. `ParallelError` where something reads more than the part."""
        program, editor = self.work.program, self.work.editor
        editor.sweep()
        for cache, (new, held) in self.parts.items():
            for user in cache.users:
                raise error(self.work.layout, KIND, user, f"{user.name} reads all of the cache {cache.name}, of which "
                                                          "each rank has a part")
            at = program.position(cache.name)
            program.inputs[at] = program.inputs[at].part(held)
            cache.meta |= {"val": new.meta["val"], PART: True}
            new.replace_all_uses_with(cache)
            editor.graph.erase_node(new)


def _behind(node: fx.Node, user: fx.Node, dim: int, pieces: Pieces) -> tuple[int, Pieces] | None:
    """Where the ``pieces`` of ``dim`` of ``node`` stand in ``user``, which moves it or writes it; None for others."""
    old, new = shape(node), shape(user) if user.op == "call_function" else ()
    if is_call(user, aten.reshape.default):
        return reshaped(old, new, dim, pieces)
    if is_call(user, aten.permute.default):
        return cast("list[int]", user.args[1]).index(dim), pieces
    if is_call(user, aten._to_copy.default, aten.clone.default):
        return dim, pieces
    written = _WRITES.get(user.target)
    if written is not None and (user.args[written] is node or user.args[0] is node):
        return (dim if user.args[0] is node else dim + len(new) - len(old)), pieces
    return None


def _copied(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """index_copy(base, at, index, new) and slice_scatter(base, new, at, …)."""
    at, place = (2, 1) if is_call(node, aten.slice_scatter.default) else (1, 3)
    args = list(node.args)
    along = cast(int, args[at] if len(args) > at else 0) % len(shape(node))
    if along == dim:
        raise narrow.error(node, f"{node.target} writes along dimension {dim}, which would be cut")
    for i in (0, place):
        args[i] = narrow.of(cast(fx.Node, args[i]), dim, pieces)
    return narrow.editor.call(node.target, *args, **node.kwargs)


def _indexed(narrow: Narrow, node: fx.Node, indices: Sequence[fx.Node | None], dim: int) -> tuple[int, int]:
    """How many first dimensions are indexed, and how many stand in their place; an error where ``dim`` is one."""
    given = [i for i in indices if i is not None]
    if list(indices) != given or dim < 0:
        raise narrow.error(node, f"{node.target} has indices for dimension {dim}, which would be cut")
    return len(given), max(len(shape(i)) for i in given)


def _put(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """index_put(base, [i, …], new): the first dimensions have indices."""
    base, indices, new = cast("tuple[fx.Node, list[fx.Node | None], fx.Node]", node.args[:3])
    _indexed(narrow, node, indices, dim - len(indices))
    at = dim + len(shape(new)) - len(shape(base))
    if at >= 0 and shape(new)[at] == shape(base)[dim]:
        new = narrow.of(new, at, pieces)
    return narrow.editor.call(node.target, narrow.of(base, dim, pieces), indices, new, *node.args[3:], **node.kwargs)


def _rows(narrow: Narrow, node: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """x[i, …]: rows of a cache."""
    x, indices = cast("tuple[fx.Node, list[fx.Node | None]]", node.args)
    replaced = max((len(shape(i)) for i in indices if i is not None), default=0)
    _indexed(narrow, node, indices, dim - replaced)
    part = narrow.of(x, dim - replaced + len(indices), pieces)
    return narrow.editor.call(node.target, part, indices)


def _norm(narrow: Narrow, item: fx.Node, dim: int, pieces: Pieces) -> fx.Node:
    """RMSNorm of each head, by a weight that all heads share."""
    node = cast(fx.Node, item.args[0]) if item.target is not operator_named(DIALECT_NORM) else item
    x, gamma = cast("tuple[fx.Node, fx.Node]", node.args[:2])
    if dim >= len(shape(x)) - len(shape(gamma)):
        raise narrow.error(node, f"{node.target} is a norm over dimension {dim}, all heads together")
    new = narrow.editor.call(node.target, narrow.of(x, dim, pieces), *node.args[1:], **node.kwargs)
    if node is item:
        return new
    if item.args[1] != 0:
        raise narrow.error(node, f"output {item.args[1]} of {node.target} is not cut")
    return narrow.editor.item(new, 0)


def own_keys(narrow: Narrow, kernel: fx.Node, heads: int, kv: int, queries: Pieces) -> Pieces:
    """Which of ``kv`` heads of keys the rank has whose query heads are ``queries``, of ``heads``.

    Every rank has a part of them, or, where there are fewer than ranks, the one that its query heads share.
    """
    size, group = narrow.work.layout.size(narrow.kind), heads // kv
    if kv % size and size % kv:
        raise narrow.error(kernel, f"{heads} query heads share {kv} heads of keys: neither {kv} / {size} nor "
                                   f"{size} / {kv} is a whole number; take a divisor or a multiple of {kv}")
    return tuple((first // group, -(-last // group)) for first, last in queries)

