"""Routed experts over the dies of ``ep``: each die has E / ep of them.

    init_routing, grouped matmuls of E experts, finalize_routing(skips)  →
    dispatch, the same grouped matmuls of this die's experts, combine;  + skips

That is for few tokens, as in decode. What dispatch does not take (more tokens, other widths or dies: the limits of its
contract) is routed by all-to-alls instead, see `routing`.

The shared expert (a skip of finalize_routing) is added behind combine and not inside it: combine then need not wait for
it, A2 has no such operand, and the operator's document has it only for dies that hold nothing but shared experts. The
model rounds the routed sum before that addition, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import fx

from cannopy.fusion_rules.contracts import check_call
from cannopy.fusion_rules.parallel import routing
from cannopy.fusion_rules.parallel.collectives import all_gather
from cannopy.fusion_rules.parallel.legality import (
    COMBINE,
    DISPATCH,
    Traffic,
    buffer_mb,
    chunks,
    dispatch_limits,
    routed_bytes,
    rows_per_die,
)
from cannopy.fusion_rules.parallel.mixtures import KIND, Mixture, mixtures, mlp, npu, wide_scales
from cannopy.fusion_rules.parallel.shards import Part, take
from cannopy.fusion_rules.parallel.tokens import error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fx_passes.graph import aten, dtype, shape, where

__all__ = ["AUTO", "EXPERTS", "KIND", "WAYS", "Spread", "cut", "summary"]

EXPERTS = "expert_parallel"
"""Key of `Program.facts`: a `Spread` for each layer of routed experts, in graph order."""

AUTO, BY_DISPATCH, BY_ROUTING = WAYS = ("auto", "dispatch", "routing")


@dataclass(frozen=True)
class Spread:
    """How one layer was spread. ``way``: ``dispatch`` or ``routing``, the latter with ``why`` when nobody asked for it.

    ``buffer_mb``: HCCL_BUFFSIZE that dispatch needs, in MB. ``routed_bytes``: of one buffer of tokens, without
    dispatch, and ``chunks`` the tokens of each chunk. ``repeated``: so many dies send the same tokens.
    """

    source: str
    way: str
    why: str
    traffic: Traffic
    buffer_mb: int = 0
    routed_bytes: int = 0
    chunks: Sequence[int] = ()
    repeated: int = 1


def summary(spreads: Iterable[Spread]) -> list[dict[str, Any]]:
    """The different ways among ``spreads`` as plain data; ``experts`` are those of a die, and ``rows`` is what its
    grouped matmuls have room for."""
    found: dict[str, dict[str, Any]] = {}
    for spread in spreads:
        t = spread.traffic
        most = replace(t, tokens=max(spread.chunks)) if spread.chunks else t
        each = {"way": spread.way, "why": spread.why, "dies": t.ep, "tokens": t.tokens, "experts": t.local,
                "rows": t.ep * rows_per_die(most), "hccl_buffsize_mb": spread.buffer_mb,
                "bytes_per_buffer": spread.routed_bytes, "chunks": list(spread.chunks), "repeated": spread.repeated}
        found.setdefault(str(each), {**each, "source": spread.source})
    return list(found.values())


def cut(work: Work) -> int:
    """Spread every mixture; the number of them. Raises `ParallelError` where one cannot be."""
    found = mixtures(work)
    work.program.facts[EXPERTS] = [_cut(work, m) for m in found]
    return len(found)


def _cut(work: Work, m: Mixture) -> Spread:
    whole = Part(0, work.layout.size(KIND)).of(m.experts, f"{KIND}: the routed experts", m.init)
    assert whole[0] == 0
    with work.editor.before(m.init):
        own = _Own.of(work, m)
    traffic = Traffic(work.target, work.layout.size(KIND), shape(own.x)[0], shape(own.x)[1], shape(own.ids)[1],
                      m.experts, m.choices, dtype(own.x).itemsize)
    way, why = _way(work, m, traffic)
    weights = cast("tuple[fx.Node, fx.Node]", tuple(local_weights(work, m)))
    if way == BY_DISPATCH:
        spread = Spread(where(m.end), way, why, traffic, buffer_mb=buffer_mb(traffic), repeated=own.repeated)
        out = _dispatched(work, m, own, weights)
    else:
        sizes = chunks(traffic, m.distinct)
        biggest = replace(traffic, tokens=max(sizes))
        spread = Spread(where(m.end), way, why, traffic, routed_bytes=routed_bytes(biggest, m.distinct), chunks=sizes,
                        repeated=own.repeated)
        with work.editor.before(m.end):
            out = routing.routed(work, m, (own.x, own.ids, own.scales), weights, sizes)
    with work.editor.before(m.end):
        if own.parts > 1:
            out = all_gather(work.editor, out, work.layout.group(work.layout.parallel.sharing))
        for skip in m.skips if way == BY_DISPATCH else m.added:
            out = work.editor.call(aten.add.Tensor, out, skip)
        work.editor.replace(m.end, out)
    return spread


@dataclass(frozen=True)
class _Own:
    """The tokens that this die sends: all of the graph's, or one of ``parts`` where the dies of a group have the same
    ones (attn_tp without sp, kvp). ``repeated`` dies send the same tokens."""

    x: fx.Node
    ids: fx.Node
    scales: fx.Node
    parts: int = 1
    repeated: int = 1

    @classmethod
    def of(cls, work: Work, m: Mixture) -> _Own:
        sharing, tokens = work.layout.parallel.sharing, shape(m.x)[0]
        same = work.layout.size(sharing)
        if m.end in work.own:
            return cls(m.x, m.ids, m.scales)
        if same == 1 or tokens % same:
            return cls(m.x, m.ids, m.scales, 1, same)
        start, stop = Part(work.layout.position(sharing), same).of(tokens, "tokens", m.init)
        x, ids = (work.editor.call(aten.slice.Tensor, n, 0, start, stop) for n in (m.x, m.ids))
        with work.editor.before(m.end):
            scales = work.editor.call(aten.slice.Tensor, m.scales, 0, start, stop)
        return cls(x, ids, scales, same)


def _way(work: Work, m: Mixture, traffic: Traffic) -> tuple[str, str]:
    """``dispatch`` or ``routing``, and why the other one is not taken where nobody asked."""
    if work.experts == BY_ROUTING:
        return BY_ROUTING, ""
    broken = dispatch_limits(traffic)
    if not m.distinct:
        broken.append(f"{DISPATCH}: a token must not choose an expert twice, which only a top-k makes sure")
    if not broken:
        return BY_DISPATCH, ""
    if work.experts == BY_DISPATCH:
        raise error(work.layout, KIND, m.init, f"experts=dispatch cannot be: {'; '.join(broken)}")
    return BY_ROUTING, "; ".join(broken)


def local_weights(work: Work, m: Mixture) -> list[fx.Node]:
    """[E / ep, H, 2I] and [E / ep, I, H]: the weights of this die's experts."""
    part = Part(work.layout.position(KIND), work.layout.size(KIND))
    piece = part.of(m.experts, f"{KIND}: the routed experts", m.init)
    return [take(work.program, work.editor, weight, 0, [piece]) for weight in m.weights]


def _dispatched(work: Work, m: Mixture, own: _Own, weights: tuple[fx.Node, fx.Node]) -> fx.Node:
    """[T, H]: the weighted sum over the chosen experts, with `Mixture.share`."""
    editor, group, a2 = work.editor, work.layout.group(KIND), work.target == "atlas-a2"
    tokens = shape(own.x)[0]
    ranks = (group.name, group.size, work.layout.position(KIND), m.experts)
    common: dict[str, Any] = {"global_bs": tokens * group.size}
    if a2:
        common |= {"comm_alg": "fullmesh", "group_tp": group.name}
    if m.choices > m.experts:
        common["copy_expert_num" if m.share is not None else "zero_expert_num"] = m.choices - m.experts
    begin = m.end if a2 else m.init
    with editor.before(begin, like=m.init):
        scales = wide_scales(work, own.scales) if a2 else None
        extra = {"expert_scales": scales} if a2 else {}
        sent = _legal(work, m, DISPATCH, own.x, own.ids, *ranks, **common, **extra)
        rows, assist, counts, received = (editor.item(sent, i) for i in (0, 2, 3, 4))
        out = mlp(work, m, rows, weights, counts)
        extra = {"expand_scales": editor.item(sent, 6)} if a2 else {}
    with editor.before(m.end):
        if m.share is not None:
            extra["ori_x"] = own.x
        scales = wide_scales(work, own.scales) if scales is None else scales
        return _legal(work, m, COMBINE, out, own.ids, assist, received, scales, *ranks, **common, **extra)


def _legal(work: Work, m: Mixture, op: str, *args: Any, **kwargs: Any) -> fx.Node:
    """The call, whose contract must hold on the product."""
    fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    broken = check_call(op, *fakes, work.target)
    if broken:
        raise error(work.layout, KIND, m.init, "; ".join(map(str, broken)))
    return work.editor.call(npu(op), *args, **kwargs)
