"""Tokens sorted by expert, grouped matmul, SwiGLU, grouped matmul, weighted sum in the old order  →

npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu, npu_grouped_matmul, npu_moe_finalize_routing.

The captured form is that of ``grouped_mm`` experts in transformers: sort the chosen ids, gather tokens and weights by
the permutation, count per expert with histc and cumsum, ``_grouped_mm`` twice, invert the permutation, sum over K.
finalize_routing sums in fp32 and rounds once; the graph rounds the routed sum before it adds the shared expert.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Number, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.engine.spellings import arguments
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fusion_rules.rewrite.expert_calls import (
    Experts,
    ExpertWeight,
    glu,
    glu_refusal,
    pairs_refusal,
    rules,
    scale_refusal,
    weight_refusal,
)
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

SORT = op((aten.sort.default, aten.sort.stable), Any("ids"), rest=True, name="sort")
PERM = op(operator.getitem, SORT, Literal(1), name="perm")
SORTED = op(operator.getitem, SORT, Literal(0))
COUNTED = Through(Alt((op(aten._to_copy.default, SORTED, dtype=Any()), SORTED)), name="counted")
COUNTS = op(aten.histc.default, COUNTED, Number("bins"), Number("low"), Number("high"))
OFFSETS = op(aten.cumsum.default, COUNTS, Alt((Literal(0), Literal(-1))), dtype=Any(), name="offsets")


def _grouped(x: Pattern, weight: str) -> Pattern:
    # transformers falls back to an op of its own where aten._grouped_mm does not take the dtype.
    return op((aten._grouped_mm.default, "transformers::grouped_mm_fallback"), x, Any(weight), OFFSETS)


TOKEN = Alt((
    op(aten.floor_divide.default, PERM, Number("top_k")),
    op(aten.div.Tensor_mode, PERM, Number("top_k"), rounding_mode=Literal("floor")),
))
ROWS = op(aten.index.Tensor, Any("x"), Items((TOKEN,)))
EXPERT_OUT = _grouped(glu(_grouped(ROWS, "gate_up")), "down")
SCALE = Alt((
    op(aten.reshape.default, op(aten.index.Tensor, Any("scales"), Items((PERM,))), Any(), name="scale"),
    op(aten.index.Tensor, Any("scales"), Items((PERM,)), name="scale"),
))
WEIGHTED = op(aten.mul.Tensor, EXPERT_OUT, SCALE, commutative=True)
INVERSE = Alt((
    op(aten.index_put.default, Any(), Items((PERM,)), op(aten.arange.default, Number("count"), rest=True)),
    op(aten.argsort.default, PERM),
    op(operator.getitem, op(aten.sort.default, PERM), Literal(1)),
))
UNSORTED = op(aten.index.Tensor, WEIGHTED, Items((INVERSE,)))


def _weight(node: object) -> ExpertWeight | None:
    """The weight behind the [E, K, N] operand of a grouped matmul."""
    transposed = is_call(node, aten.permute.default)
    if transposed and cast(fx.Node, node).args[1] != [0, 2, 1]:
        return None
    weight = ExpertWeight.of(cast(fx.Node, cast(fx.Node, node).args[0] if transposed else node), transposed)
    return weight if transposed or weight.source.op == "placeholder" else None


def _routing_refusal(match: Match) -> Refusal | None:
    """Ids are sorted upwards and counted exactly, one bin per expert; rows and scales follow the same permutation."""
    sort, scale, pairs = match["sort"], match["scale"], math.prod(shape(match["ids"]))
    given = arguments(sort)
    if given["descending"] or len(shape(match["ids"])) != 1:
        return Refusal("the flat expert ids must be sorted upwards", sort, "constant", "descending=False over [pairs]",
                       f"descending={given['descending']} over {list(shape(match['ids']))}",
                       "flatten the expert ids and sort them upwards")
    tokens, top_k = shape(match["x"])[0], match["top_k"]
    if len(shape(match["x"])) != 2 or tokens * top_k != pairs:
        return pairs_refusal(pairs, tokens, top_k, match["perm"])
    if match.get("count", pairs) != pairs:
        return Refusal("the inverse permutation does not cover every pair", match["perm"], "constant",
                       f"{pairs} pairs", f"{match['count']} pairs", "invert the permutation over all pairs")
    if (match["low"], match["high"]) != (0, match["bins"] - 1):
        return Refusal(f"histc counts {match['bins']} bins from {match['low']} to {match['high']}: not one per expert",
                       match["offsets"], "constant", f"{match['bins']} bins from 0 to {match['bins'] - 1}",
                       f"{match['bins']} bins from {match['low']} to {match['high']}",
                       "count with torch.histc(ids, bins=E, min=0, max=E - 1)")
    if dtype(match["counted"]) not in (torch.float32, torch.float64, torch.int32, torch.int64):
        return Refusal(f"expert ids are counted as {dtype(match['counted'])}, which cannot hold them all",
                       match["counted"], "dtype", "float32, float64, int32 or int64",
                       describe(dtype(match["counted"])), "cast the expert ids to float32 or int32 before histc")
    if shape(scale) != (pairs, 1) or math.prod(shape(match["scales"])) != pairs:
        return scale_refusal(scale, pairs)
    return None


def _collect(match: Match, context: Context) -> Experts | Refusal:
    refusal = _routing_refusal(match)
    if refusal is not None:
        return refusal
    gate_up, down = _weight(match["gate_up"]), _weight(match["down"])
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight is None:
            return Refusal("expert weights must be parameters [E, N, K] or [E, K, N], found a computed value",
                           match[name], "weight", "a parameter [E, N, K] or [E, K, N]", describe(match[name]),
                           "keep the weights of all experts in the module as one parameter")
    assert gate_up is not None
    assert down is not None
    experts = Experts(match["x"], match["ids"], match["scales"], shape(match["x"])[0], match["top_k"], gate_up, down)
    return (
        weight_refusal(context, experts, match["bins"])
        or glu_refusal(match, shape(match["down"])[1])
        or experts
    )


RULES = rules(
    "moe_experts",
    "Σ w · (silu(x Wg) · (x Wu)) Wd over sorted tokens  →  init_routing, grouped_matmul ×2 around swiglu, finalize",
    UNSORTED,
    _collect,
)
"""With the shared expert's output first: the shorter forms are part of the longer ones."""
