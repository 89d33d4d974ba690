"""(a + b) + npu_moe_finalize_routing(rows, s, …)  →  a + npu_moe_finalize_routing(rows, s, b, …).

finalize_routing adds up to two tensors to the weighted sum of the experts' rows, in fp32 and with one rounding. Where a
layer adds a dense MLP and its experts to the residual one after the other (LongCat), the MLP's sum costs no kernel of
its own then, and the sum that is left joins the next norm. A sum that others read as well, like the residual stream
that a norm reads, must be computed anyway and is left alone. The result waits for ``b`` instead of the other way round.
"""

from __future__ import annotations

from typing import Any as Anything
from typing import cast

from torch import fx

from cannopy.fusion_rules.engine.legal import Call, refused
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Through, op
from cannopy.fusion_rules.engine.rule import NEVER, Context, Refusal, Rule, other_reader
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

FINALIZE = op("npu::npu_moe_finalize_routing", rest=True, name="final")
SKIPS = (1, 2)
"""Positions of the two tensors that the op adds."""


def _other(node: object) -> str | None:
    """What ``node`` is instead of a sum of two tensors that one node reads."""
    if not is_call(node, aten.add.Tensor):
        return describe(node)
    total = cast(fx.Node, node)
    if not all(isinstance(term, fx.Node) for term in total.args) or total.kwargs:
        return "a sum with a number"
    return None if len(total.users) == 1 else "a sum that others read too"


def _terms(match: Match) -> tuple[fx.Node, fx.Node]:
    """What stays in the sum, and what the op adds: the term that is computed last, which is not the residual."""
    total: fx.Node = match["sum"]
    first, second = cast("tuple[fx.Node, fx.Node]", total.args)
    return (second, first) if second < first else (first, second)


def _emit(match: Match, call: Call) -> Anything:
    final: fx.Node = match["final"]
    _, term = _terms(match)
    free = next(i for i in SKIPS if final.args[i] is None)
    size = list(shape(final))
    moved = term if list(shape(term)) == size else call(aten.reshape.default, term, size)
    args = [moved if i == free else arg for i, arg in enumerate(final.args)]
    return call(final.target, *args, **final.kwargs)


def check(match: Match, context: Context) -> Refusal | None:
    """The op has room for another tensor, nobody else reads its result, and both terms are of its size and dtype."""
    final: fx.Node = match["final"]
    if None not in (final.args[i] for i in SKIPS):
        return Refusal("npu_moe_finalize_routing already adds two tensors", final, "operand",
                       "at most one tensor that is added to the experts' result", "two",
                       "nothing to do: the sum stays a kernel of its own")
    refusal = other_reader(final, match.nodes, "the experts' result")
    if refusal is not None:
        return refusal
    for term in _terms(match):
        if shape(term) != shape(match.anchor) or not dtype(term) == dtype(final) == dtype(match.anchor):
            found = f"{describe(dtype(term))}{list(shape(term))}"
            return Refusal(f"the sum before the experts' result has {found}, their result is "
                           f"{describe(dtype(final))}{list(shape(match.anchor))}", term, "shape",
                           f"{describe(dtype(final))}{list(shape(match.anchor))}", found,
                           "bring both terms to the size and dtype of the experts' result")
    return refused(context, lambda call: _emit(match, call), match.anchor)


def rewrite(match: Match, context: Context) -> None:
    """Emit the longer op and the sum that is left."""
    kept, _ = _terms(match)
    call = context.editor.call
    out = context.editor.reshape(_emit(match, call), shape(match.anchor))
    context.editor.replace(match.anchor, call(aten.add.Tensor, kept, out))


RULE = Rule(
    name="moe_finalize_add",
    equation="(a + b) + finalize_routing(rows, s)  →  a + finalize_routing(rows, s, b)",
    pattern=op(
        aten.add.Tensor,
        Any("sum", where=_other, wants="a sum of two tensors that nothing else reads"),
        Through(FINALIZE, over=(aten.reshape.default,)),
        commutative=True,
    ),
    check=check,
    rewrite=rewrite,
    kernel="npu_moe_finalize_routing",
    near=NEVER,
)
