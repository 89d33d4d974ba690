"""s = sigmoid(x); ids = topk(groups(s + b)); s[ids] / (Σ s[ids] + eps) · f  →  npu_moe_gating_top_k(x, k, b, …).

The sigmoid form always divides by the sum of the chosen scores, the softmax form (s[ids] · f) never does: that is what
norm_type 1 and 0 of the op compute (op-plugin document of npu_moe_gating_top_k). ``b`` only takes part in the choice.
A mask that gives dropped experts 0.0 (transformers before 5.8) chooses as -inf does where ``b`` is nowhere negative.
Groups of experts compete by the sum of their two best scores (group_select_mode 1) or by the best one (mode 0).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any as Anything

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import Call, refused
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Op, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule
from cannopy.fusion_rules.engine.spellings import CAST, arguments
from cannopy.fusion_rules.engine.stop import describe, short
from cannopy.fx_passes.graph import aten, dtype, is_call, shape, where
from cannopy.fx_passes.program import Program
from cannopy.fx_passes.weight_plan import derived, least

NAME = "moe_gating_top_k"
SOFTMAX, SIGMOID = 0, 1
BEST, TOP_TWO = 0, 1
NOT_NEGATIVE = (
    "(torch._assert_async((w[0] >= 0).all(), 'a correction bias was 0 or more everywhere when the model was compiled "
    "and has negative entries now'), w[0].float())[1]"
)

SCORES = Alt(
    (
        op(aten._softmax.default, Any("logits"), Number("softmax_dim"), Literal(False), name="scores"),
        op(aten.sigmoid.default, Any("logits"), name="scores"),
    ),
    name="norm_type",
)
CHOICE = Through(Alt((op(aten.add.Tensor, SCORES, Any("bias"), commutative=True), SCORES)), name="choice")

GROUPED = op(aten.reshape.default, Any("choice"), Any(), name="grouped")
GROUP_BEST = Alt((
    op(aten.amax.default, GROUPED, Items((Number("group_dim"),)), rest=True),
    op(operator.getitem, op(aten.max.dim, GROUPED, Number("group_dim"), rest=True), Literal(0)),
))
GROUP_TOP = op(aten.topk.default, GROUPED, Number("group_top"), rest=True, name="group_best")
GROUP_SUM = op(aten.sum.dim_IntList, op(operator.getitem, GROUP_TOP, Literal(0)), Items((Number("group_dim"),)))
GROUP_SCORES = Alt((GROUP_BEST, GROUP_SUM), name="group_select_mode")
GROUP_IDS = op(
    operator.getitem,
    op(aten.topk.default, GROUP_SCORES, Number("k_group"), rest=True, name="group_topk"),
    Literal(1),
)


def _marks(blank: Pattern, value: Pattern) -> Pattern:
    """[T, G] of ``blank`` with ``value`` at the chosen groups, as [T, G, 1]; a cast of 0 and 1 is 0 and 1."""
    marked = op(aten.scatter.value, blank, Alt((Literal(1), Literal(-1))), GROUP_IDS, value, name="marks")
    return op(aten.reshape.default, Through(marked, over=CAST, truth=True), Any())


def _zero(marks: Pattern) -> Pattern:
    """Where ``marks`` are 0."""
    return Alt((
        op((aten.bitwise_not.default, aten.logical_not.default), Through(marks, over=CAST, truth=True)),
        op(aten.eq.Scalar, marks, Number(equal=0)),
    ))


ZEROS = op(aten.full.default, Any(), Alt((Number(equal=0), Literal(False))), rest=True)
TRUES = op(aten.full.default, Any(), Literal(True), rest=True)
CHOSEN = _marks(ZEROS, Alt((Number(equal=1), Literal(True))))
SPREAD = op(aten.expand.default, Through(CHOSEN, over=CAST, truth=True), Any(), name="spread")
PER_EXPERT = op(aten.reshape.default, SPREAD, Any())
MASKED = Alt((
    op(aten.masked_fill.Scalar, CHOICE, _zero(PER_EXPERT), Number("fill"), name="masked"),
    op(
        aten.reshape.default,
        op(aten.masked_fill.Scalar, op(aten.reshape.default, CHOICE, Any()),
           Alt((_marks(TRUES, Literal(False)), _zero(CHOSEN))), Number("fill"), name="filled"),
        Any(),
        name="masked",
    ),
))
TOPK: Op = op(aten.topk.default, Alt((MASKED, CHOICE)), Number("k"), rest=True, name="topk")
IDS = op(operator.getitem, TOPK, Literal(1), name="ids")
PICKED = op(aten.gather.default, Any("gathered"), Number("gather_dim"), IDS, rest=True, name="picked")
VALUES = op(operator.getitem, TOPK, Literal(0))
TOTAL = op(aten.sum.dim_IntList, Any("picked"), Items((Number("sum_dim"),)), Literal(True))
NORMED = op(aten.div.Tensor, PICKED, Alt((op(aten.add.Tensor, TOTAL, Number("eps"), commutative=True), TOTAL)))

BEST_LOGITS = op(aten.topk.default, Any("choice"), Number("k"), rest=True, name="topk")
BEHIND = op(
    (aten._softmax.default, aten.sigmoid.default),
    Through(Alt((
        op(operator.getitem, BEST_LOGITS, Literal(0)),
        op(aten.gather.default, Any("gathered"), Number("gather_dim"), op(operator.getitem, BEST_LOGITS, Literal(1)),
           rest=True),
    )), over=(*CAST, aten.mul.Tensor, aten.div.Tensor)),
    rest=True,
)
"""The scores of the chosen experts only."""
OTHERWISE = op(aten.gather.default, SCORES, Any(), op(operator.getitem, BEST_LOGITS, Literal(1)), rest=True)
"""The scores of experts that are chosen by something else."""


def _last(node: fx.Node, dim: object) -> bool:
    return isinstance(dim, int) and dim % len(shape(node)) == len(shape(node)) - 1


def _vector(match: Match) -> Anything:
    """The bias, before a vector got leading dims of size 1."""
    bias = match.get("bias")
    source = bias.args[0] if is_call(bias, aten.reshape.default) else bias
    same = isinstance(source, fx.Node) and len(shape(source)) == 1 and shape(bias)[-1:] == shape(source)
    return source if same else bias


def _scores_refusal(match: Match) -> Refusal | None:
    """The op scores fp32 logits [T, E] over all experts, with a bias of the same dtype."""
    logits, scores, bias = match["logits"], match["scores"], _vector(match)
    if len(shape(logits)) != 2:
        return Refusal(f"the logits must be [tokens, experts], found shape {list(shape(logits))}", logits, "shape",
                       "[tokens, experts]", str(list(shape(logits))), "reshape the logits to two dims first")
    for name, node in (("scores", scores), ("logits", logits)):
        if dtype(node) != torch.float32:
            return Refusal(f"experts are chosen by {dtype(node)} {name}, the op chooses by fp32 {name}", node, "dtype",
                           "torch.float32", str(dtype(node)), "compute logits and scores of the router in float32")
    if match["norm_type"] == SOFTMAX and not _last(logits, match["softmax_dim"]):
        return Refusal("the softmax is not over the experts", scores, "constant", "the last dim",
                       f"dim {match['softmax_dim']}", "take the softmax over the experts: softmax(-1)")
    if bias is None:
        return None
    experts = shape(logits)[1]
    if not isinstance(bias, fx.Node) or shape(bias) != (experts,):
        return Refusal(f"the bias must be a tensor of shape [{experts}], one value per expert, found {bias}", scores,
                       "shape", f"[{experts}]", describe(bias), "give the correction bias one entry per expert")
    if dtype(bias) not in (torch.float32, torch.bfloat16, torch.float16):
        return Refusal(f"the bias is {dtype(bias)}; the op takes fp32, to which that cannot be widened exactly", bias,
                       "dtype", "float32, bfloat16 or float16", describe(dtype(bias)),
                       "keep the correction bias in float32")
    return None


def _choice_refusal(match: Match) -> Refusal | None:
    """The k largest of each row, weighted by the scores without bias."""
    topk, flags = match["topk"], arguments(match["topk"])
    if not flags["largest"] or not _last(topk.args[0], flags["dim"]):
        return Refusal("the top-k does not take the largest scores over the experts", topk, "constant",
                       "largest=True over the last dim", f"largest={flags['largest']} over dim {flags['dim']}",
                       "choose with torch.topk(scores, k, dim=-1)")
    picked = match.get("picked")
    if picked is None:
        if match["choice"] is not match["scores"]:
            return Refusal("the weights are taken from biased scores, the op takes them from the scores", topk,
                           "operand", "the scores without bias", "the scores with the bias",
                           "gather the weights from the scores before the correction bias")
    elif match["gathered"] is not match["scores"]:
        biased = match["gathered"] in (match["choice"], match.get("masked"))
        given = match["gathered"]
        other = f"{describe(given)} ({where(given)})"
        source = "biased scores" if biased and match["choice"] is not match["scores"] else other
        return Refusal(f"the weights are taken from {source}, the op takes them from the scores", picked, "operand",
                       "the scores without bias", source, "gather the weights from the scores before the bias")
    elif not _last(match["scores"], match["gather_dim"]):
        return Refusal("the weights are not gathered over the experts", picked, "constant", "the last dim",
                       f"dim {match['gather_dim']}", "gather over the experts: scores.gather(-1, ids)")
    return None


def _groups_refusal(match: Match, program: Program) -> Refusal | None:
    """Groups are runs of E/G consecutive experts, whole groups are dropped."""
    if match.get("fill") is None:
        return None
    tokens, experts = shape(match["logits"])
    grouped, marks, topk = match["grouped"], match["marks"], match["group_topk"]
    groups = shape(marks)[1] if len(shape(marks)) == 2 else 0
    if groups == 0 or shape(grouped) != (tokens, groups, experts // groups):
        return Refusal(f"groups must be [tokens, groups, experts per group], found {list(shape(grouped))}", grouped,
                       "shape", f"[{tokens}, groups, {experts} / groups]", str(list(shape(grouped))),
                       "group consecutive experts: scores.view(tokens, groups, -1)")
    refusal = _whole_groups_refusal(match, (tokens, groups, experts // groups))
    if refusal is not None:
        return refusal
    given = arguments(topk)
    if not given["largest"] or not _last(marks, given["dim"]) or not _last(grouped, match["group_dim"]):
        return Refusal("the groups with the largest scores must stay", topk, "constant",
                       "largest=True over the last dims", f"largest={given['largest']} over dim {given['dim']}, the "
                       f"experts of a group over dim {match['group_dim']}", "take torch.topk(group_scores, n, dim=-1)")
    if match["group_select_mode"] == TOP_TWO:
        best = arguments(match["group_best"])
        if best["k"] != 2 or not best["largest"] or not _last(grouped, best["dim"]):
            return Refusal(f"a group's score is the sum of its {best['k']} best, the op knows the best or the sum of "
                           "two", match["group_best"], "constant", "the best or the sum of the two best",
                           f"the sum of {best['k']}", "score a group by its best expert or by the sum of its two best")
    bias, fill = _vector(match), match.get("filled") or match["masked"]
    if match["fill"] == 0 and bias is not None and not least(program, bias) >= 0:
        return Refusal("dropped experts get the score 0.0, not -inf: the bias is not known to be 0 or more everywhere, "
                       "so the scores of kept experts may be negative and lose to them (transformers masks with -inf "
                       "from 5.8 on)", fill, "constant", "-inf, or 0.0 with a bias that is nowhere negative",
                       "0.0", "mask dropped experts with -inf: scores.masked_fill(~kept, float('-inf'))")
    if match["fill"] not in (0, -math.inf):
        return Refusal(f"dropped experts get the score {match['fill']}, the op never takes them", fill, "constant",
                       "-inf or 0.0", str(match["fill"]), "mask dropped experts with -inf")
    return None


def _whole_groups_refusal(match: Match, size: tuple[int, int, int]) -> Refusal | None:
    """The marks of the groups are spread over the experts of each group: [T, G, 1] over ``size`` [T, G, E/G]."""
    spread, filled = match.get("spread"), match.get("filled")
    over = shape(filled.args[0] if spread is None else spread)
    of = shape(filled.args[1] if spread is None else spread.args[0])
    if (over, of) == (size, (*size[:2], 1)):
        return None
    found = f"{list(of)} over {list(over)}"
    return Refusal(f"groups of consecutive experts must stay or go as a whole, the mask is {found}", match["masked"],
                   "shape", f"{[*size[:2], 1]} over {list(size)}", found,
                   "mask scores.view(tokens, groups, -1) with kept.unsqueeze(-1)")


def _divided_by_sum(picked: fx.Node) -> fx.Node | None:
    """The division of something else by (the sum over ``picked`` + eps)."""
    reached = [n for n in picked.users if is_call(n, aten.sum.dim_IntList)]
    for node in reached:
        for user in node.users:
            if is_call(user, aten.div.Tensor) and user.args[1] is node:
                above: Anything = user.args[0]
                while is_call(above, aten._to_copy.default):
                    above = above.args[0]
                if above is not picked:
                    return user
            if is_call(user, aten.add.Tensor, aten.clamp_min.default, aten._to_copy.default) and user.args[0] is node:
                reached.append(user)
    return None


def _weights_refusal(match: Match, normed: bool) -> Refusal | None:
    """Sigmoid scores are renormalised, softmax scores are not."""
    if not normed and match["norm_type"] == SIGMOID:
        picked = match.get("picked") or match["topk"]
        divided = _divided_by_sum(picked)
        if divided is not None:
            above: Anything = divided.args[0]
            found = f"{describe(above)} at {where(above)}"
            return Refusal(f"the sum of the chosen scores divides {found}, not these scores", divided, "operand",
                           describe(picked), found, "divide the chosen scores by their own sum")
        found = ", ".join(f"{describe(u)} ({where(u)})" for u in list(picked.users)[:2]) or "the result"
        # Where they are, the form with the division says why it was refused, and stands for this one.
        place = next((u for u in picked.users if is_call(u, aten.div.Tensor)), picked)
        return Refusal(f"the sigmoid scores are not divided by (their sum + eps), the op always does that: they are "
                       f"read by {found}", place, "missing", "a division by (sum over the chosen + eps)", found,
                       "renormalise the weights (norm_topk_prob=True), or keep the plain form")
    if normed and match["norm_type"] == SOFTMAX:
        return Refusal("softmax scores are divided by their sum after the choice, the op does not do that",
                       match["picked"], "operation", "softmax scores as they are", "a division by their sum",
                       "norm_topk_prob=False is the form that the op has")
    if normed and not _last(match["picked"], match["sum_dim"]):
        return Refusal("the scores are not divided by the sum over the chosen experts", match["picked"], "constant",
                       "a sum over the last dim", f"dim {match['sum_dim']}", "divide by weights.sum(-1, keepdim=True)")
    return None


def _bias(match: Match, call: Call, context: Context | None = None) -> Anything:
    """The bias in fp32. A bias that a 0.0 mask relies on comes through a recipe that checks it at every load."""
    bias = _vector(match)
    if bias is None:
        return None
    if context is not None and match.get("fill") == 0:
        return derived(context.program, context.editor, f"{bias.name}_not_negative", [bias], NOT_NEGATIVE)
    return bias if dtype(bias) == torch.float32 else call(aten._to_copy.default, bias, dtype=torch.float32)


def _emit(match: Match, call: Call, bias: Anything) -> tuple[Anything, Anything]:
    """(weights fp32 [T, k], ids int32 [T, k])."""
    grouped = match.get("fill") is not None
    routed = call(
        torch.ops.npu.npu_moe_gating_top_k.default,
        match["logits"],
        match["k"],
        bias=bias,
        k_group=match["k_group"] if grouped else 1,
        group_count=shape(match["marks"])[1] if grouped else 1,
        group_select_mode=match["group_select_mode"] if grouped else BEST,
        renorm=0,
        norm_type=match["norm_type"],
        routed_scaling_factor=float(match.get("factor", 1.0)),
        eps=float(match.get("eps", 0.0)),
    )
    return call(operator.getitem, routed, 0), call(operator.getitem, routed, 1)


def _checks(normed: bool) -> Callable[[Match, Context], Refusal | None]:
    def check(match: Match, context: Context) -> Refusal | None:
        return (
            _scores_refusal(match)
            or _choice_refusal(match)
            or _groups_refusal(match, context.program)
            or _weights_refusal(match, normed)
            or refused(context, lambda call: _emit(match, call, _bias(match, call)), match.anchor)
        )

    return check


def _rewrite(match: Match, context: Context) -> None:
    editor = context.editor
    # Readers of the ids may come before the anchor.
    with editor.before(match["topk"], like=match.anchor):
        weights, ids = _emit(match, editor.call, _bias(match, editor.call, context))
        wide = editor.call(aten._to_copy.default, ids, dtype=torch.int64)
    editor.replace(match.anchor, weights)
    for reader in list(match["topk"].users):
        if is_call(reader, operator.getitem) and reader.args[1] == 1:
            editor.replace(reader, wide)


def _chosen_first(match: Match, context: Context) -> Refusal:
    """The op scores all experts; where the choice comes first, there is nothing to fuse."""
    name = short(match.anchor.target)
    return Refusal(f"{name} is taken of the chosen logits, the op scores all experts before it chooses", match.anchor,
                   "operation", f"{name} over all experts, then the top-k", f"the top-k, then {name}",
                   "score all experts, choose, and divide by the sum of the chosen scores: for a softmax the same "
                   "weights, in a form that has a fused op")


def _otherwise(match: Match, context: Context) -> Refusal:
    """The op chooses by the scores that it returns, after a bias and a mask of groups."""
    choice = match["choice"]
    return Refusal(f"the experts are chosen by {describe(choice)}, the op chooses by scores and a bias", choice,
                   "operation", "scores, scores + bias, or -inf in place of those of dropped groups", describe(choice),
                   "choose with torch.topk(scores + bias, k)")


def _rule(equation: str, weights: Pattern, normed: bool, near: int = 6) -> Rule:
    core = None if near == NEVER else TOPK
    return Rule(NAME, equation, weights, _rewrite, _checks(normed), "npu_moe_gating_top_k", near, core)


def _scaled(weights: Pattern) -> Pattern:
    return op(aten.mul.Tensor, weights, Number("factor"))


RULES = (
    _rule("sigmoid(x)[ids] / (Σ + eps) · f  →  npu_moe_gating_top_k(norm_type=1)", _scaled(NORMED), True),
    _rule("sigmoid(x)[ids] / (Σ + eps)  →  npu_moe_gating_top_k(norm_type=1)", NORMED, True),
    _rule("softmax(x)[ids] · f  →  npu_moe_gating_top_k(norm_type=0)", _scaled(PICKED), False),
    _rule("softmax(x)[ids]  →  npu_moe_gating_top_k(norm_type=0)", PICKED, False),
    _rule("topk(softmax(x)) · f  →  npu_moe_gating_top_k(norm_type=0)", _scaled(VALUES), False, NEVER),
    _rule("topk(softmax(x))  →  npu_moe_gating_top_k(norm_type=0)", VALUES, False, NEVER),
    Rule(NAME, "topk(softmax(x))  →  npu_moe_gating_top_k(norm_type=0)", BEHIND, _rewrite, _chosen_first, near=NEVER),
    Rule(NAME, "softmax(x)[ids]  →  npu_moe_gating_top_k(norm_type=0)", OTHERWISE, _rewrite, _otherwise, near=NEVER),
)
"""With the scaling factor first: the shorter form is part of the longer one. The forms of the
values have no near misses: the ids of a top-k are none of its values. The last two match what is none of the forms and
say why."""
