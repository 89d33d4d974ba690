"""Weights gathered per pair of token and expert, batched matmul, SwiGLU, batched matmul, weighted sum  →

npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu, npu_grouped_matmul, npu_moe_finalize_routing.

The captured form is that of ``batched_mm`` experts in transformers: it copies the weights of every chosen expert once
per token, which the grouped matmul does not.
"""

from __future__ import annotations

import math

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Items, Literal, Pattern, Through, op
from cannopy.fusion_rules.engine.rule import Context, Refusal
from cannopy.fusion_rules.engine.spellings import RESHAPE
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
from cannopy.fx_passes.graph import aten, shape, where

IDS = Any("ids")
REPEATED = op(aten.expand.default, Any("x"), Any(), name="copies")
ROWS = Alt((
    op(aten.reshape.default, REPEATED, Any(), name="columns"),
    op(aten.reshape.default, Any("x"), Any(), name="columns"),
))


def _batched(weight: str, columns: Pattern) -> Pattern:
    """weight[ids] @ column of every pair, without the last dim of size 1."""
    gathered = op(aten.index.Tensor, Any(weight), Items((IDS,)), name=f"{weight}_gathered")
    product = op(aten.matmul.default, Through(gathered, over=RESHAPE, name=f"{weight}_rows"), columns,
                 name=f"{weight}_mm")
    return Alt((
        op(aten.reshape.default, product, Any(), name=f"{weight}_out"),
        op(aten.select.int, product, Literal(2), Literal(0), name=f"{weight}_out"),
    ))


EXPERT_OUT = _batched("down", op(aten.reshape.default, glu(_batched("gate_up", ROWS)), Any(), name="hidden"))
SCALE = op(aten.reshape.default, Any("scales"), Any(), name="scale")
WEIGHTED = op(aten.mul.Tensor, Through(EXPERT_OUT, over=RESHAPE, name="out"), SCALE, commutative=True)


def _products_refusal(match: Match, pairs: tuple[int, ...]) -> Refusal | None:
    """Every pair of token and expert has its weights [N, K] times its column [K, 1]; ``pairs`` is [T · K] or [T, K].

    With pairs [T, K] those of a token may share its column: [T, K, N, H] · [T, 1, H, 1], or [T, K · N, H] · [T, H, 1].
    """
    hidden = shape(match["gate_up"])[-1]
    width, inner = shape(match["gate_up"])[1], shape(match["down"])[-1]
    found = [shape(match[name]) for name in ("gate_up_rows", "columns", "down_rows", "hidden")]
    down = [(*pairs, hidden, inner), (*pairs, inner, 1)]
    forms = [[(*pairs, width, hidden), (*pairs, hidden, 1), *down]]
    if len(pairs) == 2:
        tokens, top_k = pairs
        forms += [[(tokens, top_k, width, hidden), (tokens, 1, hidden, 1), *down],
                  [(tokens, top_k * width, hidden), (tokens, hidden, 1), *down]]
    if found in forms and shape(match["gate_up_out"])[-1] == width:
        return None
    return Refusal("expected weights [E, N, K] times one column per pair", match["gate_up_mm"], "shape",
                   f"weights {list(forms[0][0])}, columns {list(forms[0][1])}",
                   f"weights {list(found[0])}, columns {list(found[1])}",
                   "keep the weights of all experts in one parameter [E, N, K]")


def _collect(match: Match, context: Context) -> Experts | Refusal:
    gate_up, down, ids = match["gate_up"], match["down"], match["ids"]
    pairs, copies = math.prod(shape(ids)), match.get("copies")
    if len(shape(gate_up)) != 3 or len(shape(down)) != 3:
        return Refusal("expected weights [E, N, K] times one column per pair", match["gate_up_mm"], "shape",
                       "weights [E, N, K]", f"{list(shape(gate_up))} and {list(shape(down))}",
                       "keep the weights of all experts in one parameter [E, N, K]")
    top_k = shape(copies)[1] if copies is not None and len(shape(copies)) == 3 else 1
    if len(shape(ids)) == 2 and copies is None:
        top_k = shape(ids)[1]
    elif len(shape(ids)) == 1 and copies is None and shape(match["sum"].args[0])[1:2] != (1,):
        found = f"{describe(match['x'])} ({where(match['x'])})"
        return Refusal(f"tokens must be repeated once per chosen expert, the rows are {found}", match["x"], "operation",
                       "an expanded tensor of tokens", found, "expand the tokens right before the products")
    hidden = shape(gate_up)[-1]
    tokens = math.prod(shape(match["x"])) // hidden
    if tokens * top_k != pairs or (len(shape(ids)) != 1 and shape(ids) != (tokens, top_k)):
        return pairs_refusal(pairs, tokens, top_k, ids)
    if copies is not None and (shape(match["x"]), shape(copies)) != ((tokens, 1, hidden), (tokens, top_k, hidden)):
        return Refusal("tokens must be repeated once per chosen expert, side by side", copies, "shape",
                       f"{[tokens, 1, hidden]} expanded to {[tokens, top_k, hidden]}",
                       f"{list(shape(match['x']))} expanded to {list(shape(copies))}",
                       "repeat each token once per chosen expert: repeat_interleave(top_k, 0)")
    refusal = _products_refusal(match, shape(ids))
    if refusal is not None:
        return refusal
    rows = shape(match["out"])[:-1]
    if shape(match["scale"]) != (*rows, 1) or math.prod(rows) != pairs:
        return scale_refusal(match["scale"], pairs)
    experts = Experts(
        match["x"], ids, match["scales"], tokens, top_k, ExpertWeight.of(gate_up, True), ExpertWeight.of(down, True)
    )
    return (
        weight_refusal(context, experts, shape(gate_up)[0])
        or glu_refusal(match, shape(down)[2], len(shape(match["gate_up_out"])) - 1)
        or experts
    )


RULES = rules(
    "moe_experts",
    "Σ w · (silu(x Wg) · (x Wu)) Wd with W gathered per token  →  init_routing, grouped_matmul ×2, finalize",
    WEIGHTED,
    _collect,
)
"""With the shared expert's output first: the shorter forms are part of the longer ones."""
