"""The kernel sequence of a routed expert MLP, shared by the rules that recognise it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any as Anything
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import Call, refused
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule, other_reader
from cannopy.fusion_rules.engine.spellings import gated_halves_refusal, half
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.rewrite.zero_experts import Unmasked, before, handed_on, unmasked, whole_ids
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, truncates
from cannopy.fx_passes.weight_plan import derived, preview, why_not_weight

ROUTED, DROPPED = 2, 3
"""drop_pad_mode of npu_moe_finalize_routing with the row of each pair in row-major order: every pair has one, or some
have -1, which adds nothing; the op's document allows -1 in mode 3 only."""


@dataclass(frozen=True)
class ExpertWeight:
    """Weights of all experts for one grouped matmul: a placeholder [E, N, K] to transpose at load, or [E, K, N].

    ``rows``: only so many experts are read, the first ones.
    """

    source: fx.Node
    transposed: bool
    rows: int | None = None

    @classmethod
    def of(cls, node: fx.Node, transposed: bool) -> ExpertWeight:
        """The weight ``node``, which may be the first experts of a longer stack."""
        first = is_call(node, aten.slice.Tensor) and tuple(node.args[1:3]) == (0, 0) and (*node.args, 1)[4] == 1
        return cls(cast(fx.Node, node.args[0]), transposed, shape(node)[0]) if first else cls(node, transposed)

    @property
    def experts(self) -> int:
        """How many experts it has."""
        return self.rows or shape(self.source)[0]

    @property
    def recipe(self) -> str | None:
        """What is to be done to the source at load time: brings the input features of [E, N, K] to the middle."""
        kept = "w[0]" if self.rows is None else f"w[0][:{self.rows}]"
        return f"{kept}.transpose(1, 2)" if self.transposed else None if self.rows is None else kept

    def value(self, context: Context) -> torch.Tensor:
        """The fake value [E, K, N]."""
        if self.recipe is None:
            return cast(torch.Tensor, self.source.meta["val"])
        return preview(context.editor, [self.source], self.recipe)

    def node(self, context: Context) -> fx.Node:
        """The placeholder [E, K, N]; on a device it is FRACTAL_NZ unless fp32, as grouped matmul reads it fastest."""
        if self.recipe is None:
            return self.source
        nz = dtype(self.source) != torch.float32
        return derived(context.program, context.editor, f"{self.source.name}_kn", [self.source], self.recipe, nz)


@dataclass(frozen=True)
class Experts:
    """What an expert MLP is made of: x of T·H, ids and scales of T·K elements, and the weights.

    ``choices``: the ids are below that number; those that have no weights are zero experts (see `zero_experts`), whose
    part of the result is added where ``share``.
    """

    x: fx.Node
    ids: fx.Node
    scales: fx.Node
    tokens: int
    top_k: int
    gate_up: ExpertWeight
    down: ExpertWeight
    skip: fx.Node | None = None
    choices: int | None = None
    share: bool = False

    @property
    def hidden(self) -> int:
        """H, the features of x and of the result."""
        return math.prod(shape(self.x)) // self.tokens


def _chosen_ids(ids: fx.Node) -> fx.Node:
    """The ids before reshapes, and before int32 ids were widened."""
    narrow = whole_ids(ids)
    return narrow if dtype(narrow) == torch.int32 else before(ids, aten.reshape.default)


def _shaped(call: Call, x: fx.Node, size: list[int]) -> Anything:
    if list(shape(x)) == size:
        return x
    source = before(x, aten.reshape.default)
    return source if list(shape(source)) == size else call(aten.reshape.default, source, size)


def emit(e: Experts, call: Call, gate_up: Anything, down: Anything) -> Anything:
    """[T, H]: route, two grouped matmuls around a SwiGLU, weighted sum plus ``skip``."""
    npu = torch.ops.npu
    experts = e.gate_up.experts
    pairs = [e.tokens, e.top_k]
    ids = _chosen_ids(e.ids)
    ids_2d = _shaped(call, ids, pairs)
    if dtype(ids) != torch.int32:
        ids_2d = call(aten._to_copy.default, ids_2d, dtype=torch.int32)
    x = _shaped(call, e.x, [e.tokens, e.hidden])
    scales = _shaped(call, e.scales, pairs)
    routed = call(
        npu.npu_moe_init_routing_v2.default, x, ids_2d, active_num=e.tokens * e.top_k,
        expert_num=e.choices or experts,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, experts],
        row_idx_type=0,
    )
    rows, row_idx, counts = (call(operator.getitem, routed, i) for i in range(3))

    def grouped(a: Anything, weight: Anything) -> Anything:
        product = call(
            npu.npu_grouped_matmul.default, [a], [weight], group_list=counts, split_item=3, group_type=0,
            group_list_type=1,
        )
        return call(operator.getitem, product, 0)

    hidden = call(npu.npu_swiglu.default, grouped(rows, gate_up))
    out = grouped(hidden, down)
    if e.choices is not None:
        # As [experts, rows each, H], which this mode asks for; the op wants no less experts than K.
        out = call(aten.reshape.default, out, [e.top_k, e.tokens, e.hidden])
    skip = _share(e, call, x, ids_2d, scales) if e.share else None
    if e.skip is not None:
        skip = _shaped(call, e.skip, [e.tokens, e.hidden])
    return call(
        npu.npu_moe_finalize_routing.default, out, skip, None, None, scales, row_idx, None,
        drop_pad_mode=ROUTED if e.choices is None else DROPPED,
    )


def _share(e: Experts, call: Call, x: Anything, ids: Anything, scales: Anything) -> Anything:
    """x · Σ_k [id >= E] w of zero experts, [T, H], rounded to the dtype of x."""
    zero = call(aten.masked_fill.Scalar, scales, call(aten.lt.Scalar, ids, e.gate_up.experts), 0.0)
    weight = call(aten.sum.dim_IntList, zero, [-1], True)
    narrow, wide = dtype(e.x), torch.promote_types(dtype(e.x), dtype(e.scales))
    if wide == narrow:
        return call(aten.mul.Tensor, x, weight)
    # Cast before the product: routers read their tokens so, and equal casts become one.
    product = call(aten.mul.Tensor, call(aten._to_copy.default, x, dtype=wide), weight)
    return call(aten._to_copy.default, product, dtype=narrow)


def weight_refusal(context: Context, e: Experts, experts: int) -> Refusal | None:
    """Weights are constant and belong to ``experts`` experts. Their dtype is a clause of npu_grouped_matmul."""
    for weight in (e.gate_up, e.down):
        reason = why_not_weight(context.program, weight.source) if weight.recipe else None
        if reason is not None:
            return Refusal(f"expert weights must be parameters to be laid out as [E, K, N] at load time: {reason}",
                           weight.source, "weight", "a parameter or buffer", reason,
                           "keep the weights of all experts in the module as one parameter")
        if weight.experts != experts:
            return Refusal(f"{experts} experts are counted, the weights have {weight.experts}", weight.source,
                           "shape", f"weights of {experts} experts", str(list(shape(weight.source))),
                           "count as many experts as the weights have")
    return None


def pairs_refusal(pairs: int, tokens: int, top_k: int, node: fx.Node) -> Refusal:
    """The pairs of token and expert are not ``tokens`` times ``top_k``."""
    return Refusal(f"{pairs} pairs of token and expert are not {tokens} tokens times {top_k}", node, "shape",
                   f"{tokens * top_k} expert ids in one dim", f"{pairs} expert ids, {describe(node)}",
                   "choose the same number of experts for every token and flatten the ids")


def scale_refusal(scale: fx.Node, pairs: int) -> Refusal:
    """The weights of the experts are not one per pair."""
    found = str(list(shape(scale)))
    return Refusal(f"the weights must be one per pair of token and expert, found {found}", scale, "shape",
                   f"[{pairs}, 1]", found, "weight each expert's result with the one score of its token")


def glu_refusal(match: Match, intermediate: int, dim: int = 1) -> Refusal | None:
    """SiLU is on the first half of ``dim`` of the up projection; nothing to check when npu_swiglu did it already."""
    if match.get("gate_start") is None:
        return None
    return gated_halves_refusal(match, dim, 2 * intermediate)


def glu(up_projection: Pattern) -> Pattern:
    """silu(one half) · other half of ``up_projection``, or npu_swiglu of it."""
    silu = op(aten.silu.default, half(up_projection, "gate"), name="silu")
    return Alt((
        op(aten.mul.Tensor, silu, half(up_projection, "up"), commutative=True),
        op("npu::npu_swiglu", up_projection),
    ))


def summed(weighted: Pattern) -> Pattern:
    """Σ over K of [T, K, H]."""
    product = Through(weighted, over=(aten.reshape.default,))
    return op(aten.sum.dim_IntList, product, Items((Number("sum_dim"),)), name="sum")


Collect = Callable[[Match, Context], Experts | Refusal]


def _skipped(match: Match, experts: Experts) -> Experts | Refusal:
    """``experts`` with the value that the graph adds to their result."""
    shared = match.get("shared")
    if shared is None:
        return experts
    part = before(shared, aten._to_copy.default) if isinstance(shared, fx.Node) else shared
    if experts.choices is not None:
        given = Unmasked(experts.ids, experts.scales, experts.choices)
        if handed_on(part, experts.x, (experts.tokens, experts.top_k), given, experts.gate_up.experts):
            return replace(experts, share=True)
    if match.get("wide") is not None:
        found = describe(shared)
        return Refusal("what is added before the sum is rounded is not the share of zero experts: the sum stays as it "
                       "is", match["wide"], "operand", "x · Σ w over the numbers that have no weights", found,
                       f"round the sum over the chosen experts to {describe(dtype(experts.x))} before {found} is added")
    if not isinstance(shared, fx.Node) or shape(shared) != shape(match.anchor):
        return Refusal("what is added to the experts' result is not a tensor of its shape: added separately",
                       match.anchor, "shape", str(list(shape(match.anchor))), describe(shared),
                       "expand it to the shape of the experts' result")
    if dtype(shared) != dtype(experts.x):
        return Refusal(f"what is added to the experts' result is {dtype(shared)}, not {dtype(experts.x)}: added "
                       "separately", shared, "dtype", str(dtype(experts.x)), str(dtype(shared)),
                       f"cast it to {describe(dtype(experts.x))} before the sum")
    if len(shared.users) != 1:
        read = _has_readers(shared, [match.anchor], "what is added",
                            "what is added to the experts' result has other readers: added separately")
        return replace(read, remedy=_NORM_TAKES_IT) if _normed(match.anchor) else read
    return replace(experts, skip=shared)


_NORM_TAKES_IT = "leave it: the sum with the residual becomes part of the norm that reads it (add_rms_norm)"


def _normed(node: fx.Node) -> bool:
    readers = [r for u in node.users for r in (u.users if is_call(u, aten.reshape.default) else (u,))]
    return any(str(r.target) == "cannopy.rms_norm.default" for r in readers)


def _has_readers(node: fx.Node, allowed: Sequence[fx.Node], what: str, reason: str) -> Refusal:
    """``reason``, with a reader of ``node`` outside of the formula (or any, when there is none) as what was found."""
    other = other_reader(node, allowed, what) or other_reader(node, (), what)
    assert other is not None
    return replace(other, reason=reason)


def _read_elsewhere(match: Match) -> fx.Node | None:
    """A node between the sum and the anchor that others read too, so that the whole captured form would stay."""
    node: fx.Node = match["sum"]
    while node is not match.anchor:
        if len(node.users) != 1:
            return node
        node = next(iter(node.users))
    return None


def _result_refusal(match: Match, e: Experts) -> Refusal | None:
    total = match["sum"]
    product = cast(fx.Node, total.args[0])
    if match["sum_dim"] not in (1, -2) or shape(product) != (e.tokens, e.top_k, e.hidden):
        wanted = [e.tokens, e.top_k, e.hidden]
        return Refusal(f"the result must be the sum of [T, K, H] = {wanted} over K", total, "shape",
                       f"{wanted} summed over dim 1", f"{list(shape(product))} summed over dim {match['sum_dim']}",
                       "sum the weighted results of each token over its chosen experts")
    shared_result = _read_elsewhere(match)
    if shared_result is not None:
        return _has_readers(shared_result, match.nodes, "the experts' result",
                            "the experts' result has other readers before it is cast or added to")
    rounded = match.get("routed")
    if isinstance(rounded, fx.Node) and truncates(rounded):
        return Refusal(f"the experts' result is cast to {dtype(rounded)}, which changes it", rounded, "dtype",
                       str(dtype(e.x)), str(dtype(rounded)), "cast the experts' result to a floating point type")
    if dtype(match.anchor) != dtype(e.x):
        return Refusal(f"the result stays {dtype(match.anchor)}; npu_moe_finalize_routing gives {dtype(e.x)}",
                       match.anchor, "dtype", str(dtype(e.x)), str(dtype(match.anchor)),
                       f"cast the sum over the chosen experts to {dtype(e.x)}")
    return None


def rules(name: str, equation: str, weighted: Pattern, collect: Collect) -> tuple[Rule, ...]:
    """The rule for results that are cast or not and have another tensor added or not, longest form first."""

    def plan(match: Match, context: Context) -> Experts | Refusal:
        experts = collect(match, context)
        if isinstance(experts, Refusal):
            return experts
        found = unmasked(experts.ids, experts.scales, experts.gate_up.experts)
        if found is not None:
            experts = replace(experts, ids=found.ids, scales=found.scales, choices=found.choices)
        return _skipped(match, experts)

    def check(match: Match, context: Context) -> Refusal | None:
        e = plan(match, context)
        if isinstance(e, Refusal):
            return e
        return _result_refusal(match, e) or refused(
            context, lambda call: emit(e, call, e.gate_up.value(context), e.down.value(context)), match.anchor
        )

    def rewrite(match: Match, context: Context) -> None:
        e = plan(match, context)
        assert isinstance(e, Experts)
        out = emit(e, context.editor.call, e.gate_up.node(context), e.down.node(context))
        context.editor.replace(match.anchor, context.editor.reshape(out, shape(match.anchor)))

    total = summed(weighted)
    cast_total = op(aten._to_copy.default, total, name="routed", dtype=Any())
    plain_total = Through(total, name="routed")

    def added(routed: Pattern) -> Pattern:
        return op(aten.add.Tensor, Through(routed, over=(aten.reshape.default,)), Any("shared"), commutative=True)

    wide = op(aten.add.Tensor, total, Any("shared"), commutative=True, name="wide")
    forms = (op(aten._to_copy.default, wide, dtype=Any()), added(cast_total), added(plain_total), cast_total, total)
    core = weighted if isinstance(weighted, Op) else None
    return tuple(Rule(name, equation, form, rewrite, check, "npu_grouped_matmul", near=5, core=core) for form in forms)
