"""Routed experts of a fused graph: routing, two grouped matmuls around a SwiGLU, the weighted sum; or why not these."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.record import Log
from cannopy.fusion_rules.parallel.places import called
from cannopy.fusion_rules.parallel.tokens import error
from cannopy.fusion_rules.parallel.work import Work
from cannopy.fusion_rules.rewrite.expert_calls import DROPPED, ROUTED
from cannopy.fusion_rules.rewrite.zero_experts import Unmasked, before, handed_on, whole_ids
from cannopy.fx_passes.graph import aten, dtype, is_call, operator_named, shape
from cannopy.fx_passes.weight_plan import why_not_weight

KIND = "ep"
RULE = "moe_experts"
"""The fusion that makes what is looked for here."""

INIT, FINALIZE = "npu::npu_moe_init_routing_v2", "npu::npu_moe_finalize_routing"
GROUPED, SWIGLU, GATING = "npu::npu_grouped_matmul", "npu::npu_swiglu", "npu::npu_moe_gating_top_k"


@dataclass(frozen=True)
class Mixture:
    """x [T, H], ids int32 [T, K], scales [T, K], weights [E, H, 2I] and [E, I, H] of one routed MLP.

    ``init``, ``grouped`` (both), ``swiglu`` and ``end`` are the nodes that it is made of. ``skips`` [T, H] are added to
    the sum. Ids are below ``choices``; those from E on are zero experts, whose part is ``share`` [T, H], to be added as
    well; without it they add nothing.
    """

    init: fx.Node
    grouped: tuple[fx.Node, fx.Node]
    swiglu: fx.Node
    end: fx.Node
    weights: tuple[fx.Node, fx.Node]
    skips: tuple[fx.Node, ...]
    share: fx.Node | None
    choices: int

    @property
    def x(self) -> fx.Node:
        """[T, H]."""
        return cast(fx.Node, self.init.args[0])

    @property
    def ids(self) -> fx.Node:
        """int32 [T, K]."""
        return cast(fx.Node, self.init.args[1])

    @property
    def scales(self) -> fx.Node:
        """[T, K]."""
        return cast(fx.Node, _given(self.end)["scales"])

    @property
    def experts(self) -> int:
        """E, the experts that have weights."""
        return shape(self.weights[0])[0]

    @property
    def added(self) -> tuple[fx.Node, ...]:
        """All that is added to the sum over the experts that have weights, [T, H] each."""
        return self.skips if self.share is None else (self.share, *self.skips)

    @property
    def distinct(self) -> bool:
        """Whether the ids of a token differ by construction: a top-k gave them."""
        found = whole_ids(self.ids)
        if not is_call(found, operator.getitem) or found.args[1] != 1:
            return False
        return called(found.args[0], (GATING, "aten::topk"))


def mixtures(work: Work, kind: str = KIND) -> list[Mixture]:
    """Every routed MLP, in graph order. Raises `ParallelError` of the cut of ``kind`` for experts that are not of that
    form."""
    ends = work.editor.calls([FINALIZE])
    found = [_mixture(work, end, kind) for end in ends]
    known = {n for m in found for n in (m.init, *m.grouped)}
    for node in work.editor.calls([INIT, GROUPED, "aten::_grouped_mm", "transformers::grouped_mm_fallback"]):
        if node not in known:
            raise error(work.layout, kind, node, f"{node.target} is not part of routed experts that can be spread"
                                                 f"{why_not_fused(work.log)}")
    _all_are_fused(work, found, kind)
    return found


def why_not_fused(log: Log | None) -> str:
    """What the fusion of experts has to say about places where it was not applied."""
    places = [m for m in log.places() if m.rule == RULE] if log is not None else []
    if not places:
        return f"; only experts that the fusion {RULE} has put into kernels can be: is it switched off?"
    reasons = dict.fromkeys(f"{m.reason} ({m.source}){f': {m.remedy}' if m.remedy else ''}" for m in places)
    return f"; the fusion {RULE} did not apply: {'; '.join(reasons)}"


def _all_are_fused(work: Work, found: Sequence[Mixture], kind: str) -> None:
    """Every router's choice leads to experts that were found: no mixture stays whole."""
    routed = {whole_ids(m.ids).args[0] for m in found if is_call(whole_ids(m.ids), operator.getitem)}
    for router in work.editor.calls([GATING]):
        if router not in routed:
            raise error(work.layout, kind, router, "the experts that this router chooses are in no kernel that can be "
                                                   f"spread{why_not_fused(work.log)}")


class _Parts:
    """Takes a mixture apart from its end; every step that does not fit is an error that names the node."""

    def __init__(self, work: Work, kind: str) -> None:
        self.work, self.kind = work, kind

    def refuse(self, node: fx.Node, text: str) -> Any:
        raise error(self.work.layout, self.kind, node, f"routed experts cannot be spread: {text}")

    def call(self, node: object, name: str, reader: fx.Node) -> fx.Node:
        """``node``, which must call ``name`` and be read by the experts alone."""
        if not called(node, [name]):
            return cast(fx.Node, self.refuse(node if isinstance(node, fx.Node) else reader,
                                             f"{name.partition('::')[2]} is expected before {reader.target}"))
        return cast(fx.Node, node)

    def output(self, node: object, index: int, name: str, reader: fx.Node) -> fx.Node:
        """The call of ``name`` whose output ``index`` is ``node``."""
        if not is_call(node, operator.getitem) or cast(fx.Node, node).args[1] != index:
            return cast(fx.Node, self.refuse(node if isinstance(node, fx.Node) else reader,
                                             f"output {index} of {name.partition('::')[2]} is expected"))
        return self.call(cast(fx.Node, node).args[0], name, reader)

    def only(self, node: fx.Node, **wanted: Any) -> dict[str, Any]:
        """The arguments of ``node``, of which those named must have these values and others their defaults."""
        given = _given(node)
        for name, value in given.items():
            default = next(a.default_value for a in node.target._schema.arguments if a.name == name)  # type: ignore[union-attr]
            expected = wanted.get(name, default)
            if expected is not ... and _plain(value) != _plain(expected):
                self.refuse(node, f"{name} of {node.target} must be {expected}, found {value}")
        return given

    def read_by(self, node: fx.Node, *readers: fx.Node) -> None:
        """Nothing else may read ``node``."""
        for user in node.users:
            if user not in readers:
                self.refuse(user, f"it reads {node.name} inside of the experts")


def _mixture(work: Work, end: fx.Node, kind: str) -> Mixture:
    parts = _Parts(work, kind)
    end_given = parts.only(end, expanded_permuted_rows=..., skip1=..., skip2=..., bias=None, scales=...,
                           expanded_src_to_dst_row=..., export_for_source_row=None, drop_pad_mode=...)
    mode, rows = end_given["drop_pad_mode"], end_given["expanded_permuted_rows"]
    if mode not in (ROUTED, DROPPED):
        parts.refuse(end, f"drop_pad_mode {mode} leaves out pairs of token and expert")
    readers = [end]
    while is_call(rows, aten.reshape.default):
        parts.read_by(rows, readers[-1])
        readers.append(rows)
        rows = cast(fx.Node, rows.args[0])
    parts.read_by(rows, readers[-1])
    down = parts.output(rows, 0, GROUPED, end)
    parts.read_by(down, rows)
    hidden, w_down, counts = _grouped(parts, down)
    swiglu = parts.call(hidden, SWIGLU, down)
    parts.read_by(swiglu, down)
    up = parts.only(swiglu, input=..., dim=-1)["input"]
    gate_up = parts.output(up, 0, GROUPED, swiglu)
    parts.read_by(up, swiglu)
    parts.read_by(gate_up, up)
    copies, w_gate_up, first_counts = _grouped(parts, gate_up)
    init = parts.output(copies, 0, INIT, gate_up)
    parts.read_by(copies, gate_up)
    for node, index in ((counts, 2), (first_counts, 2), (end_given["expanded_src_to_dst_row"], 1)):
        if parts.output(node, index, INIT, end) is not init:
            parts.refuse(node, f"it belongs to another routing than {init.name}")
        parts.read_by(node, down, gate_up, end)
    parts.read_by(init, copies, counts, first_counts, end_given["expanded_src_to_dst_row"])
    return _checked(parts, init, (gate_up, down), swiglu, end, (w_gate_up, w_down))


def _grouped(parts: _Parts, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Rows, weights and group list of an unquantised grouped matmul without bias."""
    given = parts.only(node, x=..., weight=..., group_list=..., split_item=3, group_type=0, group_list_type=1)
    (x,), (weight,) = given["x"], given["weight"]
    reason = why_not_weight(parts.work.program, weight)
    if reason is not None:
        parts.refuse(node, f"the weights of the experts must be parameters: {reason}")
    return x, weight, given["group_list"]


def _checked(parts: _Parts, init: fx.Node, grouped: tuple[fx.Node, fx.Node], swiglu: fx.Node, end: fx.Node,
             weights: tuple[fx.Node, fx.Node]) -> Mixture:
    x, ids = cast("tuple[fx.Node, fx.Node]", init.args[:2])
    tokens, top_k, experts = *shape(ids), shape(weights[0])[0]
    given = parts.only(init, x=..., expert_idx=..., active_num=tokens * top_k, expert_num=..., expert_tokens_num_type=1,
                       expert_tokens_num_flag=True, active_expert_range=[0, experts])
    end_given = _given(end)
    scales, choices = end_given["scales"], given["expert_num"]
    skips = [n for n in (end_given["skip1"], end_given.get("skip2")) if n is not None]
    if scales is None or shape(scales) != (tokens, top_k):
        parts.refuse(end, f"one weight per pair of token and expert is expected, {[tokens, top_k]}")
    if shape(end) != shape(x):
        parts.refuse(end, f"the sum has shape {list(shape(end))}, the tokens {list(shape(x))}")
    if (choices > experts) != (end_given["drop_pad_mode"] == DROPPED):
        parts.refuse(end, f"drop_pad_mode {end_given['drop_pad_mode']} does not fit {choices} choices of {experts} "
                          "experts")
    share = next((n for n in skips if choices > experts and _is_share(n, x, ids, scales, choices, experts)), None)
    return Mixture(init, grouped, swiglu, end, weights, tuple(n for n in skips if n is not share), share, choices)


def _is_share(skip: fx.Node, x: fx.Node, ids: fx.Node, scales: fx.Node, choices: int, experts: int) -> bool:
    """Whether ``skip`` is what zero experts hand on: the token times the sum of their weights."""
    given = Unmasked(ids, scales, choices)
    return handed_on(before(skip, aten._to_copy.default), x, cast("tuple[int, int]", shape(ids)), given, experts)


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments that are written, by name."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def mlp(work: Work, m: Mixture, rows: fx.Node, weights: tuple[fx.Node, fx.Node], counts: fx.Node) -> fx.Node:
    """The experts ``weights`` on rows that stand by expert, ``counts`` of each; rows behind the last are not set."""
    def grouped(old: fx.Node, x: fx.Node, weight: fx.Node) -> fx.Node:
        kwargs = {k: v for k, v in old.kwargs.items() if k != "group_list"}
        return work.editor.item(work.editor.call(old.target, [x], [weight], **kwargs, group_list=counts), 0)

    hidden = work.editor.call(m.swiglu.target, grouped(m.grouped[0], rows, weights[0]), *m.swiglu.args[1:],
                              **m.swiglu.kwargs)
    return grouped(m.grouped[1], hidden, weights[1])


def wide_scales(work: Work, scales: fx.Node) -> fx.Node:
    """``scales`` in float32, which every narrower float fits into."""
    if dtype(scales) == torch.float32:
        return scales
    if dtype(scales) not in (torch.bfloat16, torch.float16):
        raise error(work.layout, KIND, scales, f"weights of experts are summed in float32, found {dtype(scales)}")
    return work.editor.call(aten._to_copy.default, scales, dtype=torch.float32)


def npu(name: str) -> Any:
    """The operator ``npu::name``."""
    return operator_named(f"npu::{name}")
