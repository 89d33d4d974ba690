"""x = a + b; y = cannopy::rms_norm(x, gamma, eps)  →  y, _, x = npu_add_rms_norm(a, b, gamma, eps).

The sum may have other users (the residual stream): they read the op's third output.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Alt, Any, Number, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule
from cannopy.fusion_rules.engine.stop import describe
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

OTHERS = (aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default)
"""Operations of two tensors that are no sum."""


def check(match: Match, ctx: Context) -> Refusal | None:
    """A sum of two tensors of equal shape and dtype, and the op's contract."""
    other = match.get("other")
    if other is not None:
        return _no_sum(other)
    a, b, total = match["a"], match["b"], match["sum"]
    for value in (a, b):
        if not isinstance(value, fx.Node):
            return Refusal(f"the sum adds the constant {value}", total, "operand",
                           f"a tensor {list(shape(total))}", f"the constant {value}",
                           "add a tensor of the shape and dtype of the hidden states, or leave the two apart")
        if shape(value) != shape(total):
            return Refusal(f"the sum broadcasts {list(shape(value))} to {list(shape(total))}", total, "shape",
                           str(list(shape(total))), str(list(shape(value))),
                           f"expand {value.name} to {list(shape(total))} before the sum")
        if dtype(value) != dtype(total):
            return Refusal(f"the sum mixes {dtype(value)} and {dtype(total)}", total, "dtype", describe(dtype(total)),
                           describe(dtype(value)), f"cast {value.name} to {describe(dtype(total))} before the sum, or "
                           "keep both in one dtype")
    args = (a.meta["val"], b.meta["val"], match["gamma"].meta["val"], float(match["eps"]))
    return illegal("npu_add_rms_norm", args, {}, match.anchor, ctx, {"x1": a, "x2": b, "gamma": match["gamma"]})


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op; users of the sum read its third output."""
    out = ctx.editor.call(
        torch.ops.npu.npu_add_rms_norm.default, match["a"], match["b"], match["gamma"], float(match["eps"])
    )
    normed, total = (ctx.editor.call(operator.getitem, out, i) for i in (0, 2))
    ctx.editor.replace(match["sum"], total)
    ctx.editor.replace(match.anchor, normed)


def _no_sum(other: fx.Node) -> Refusal:
    """The refusal of what stands for a residual sum and is none."""
    cast = is_call(other, aten._to_copy.default)
    return Refusal(f"the norm reads no sum of two tensors, found {describe(other)}", other, "operation", "aten.add",
                   describe(other), "drop this cast, or keep one dtype, so that the norm reads the sum" if cast else
                   "compute this step with aten.add")


def _unlike_a_residual(value: object) -> str | None:
    """What ``value`` is unless it stands for a residual sum: a rounded sum, or another operation of two tensors.

    All are [..., H]. A gated product whose result and operands only the norm reads is none: no residual goes on there.
    """
    if not isinstance(value, fx.Node):
        return describe(value)
    if is_call(value, aten._to_copy.default):
        alike = _of_two(value.args[0], aten.add.Tensor)
    else:
        alike = _of_two(value, *OTHERS) and any(len(n.users) > 1 for n in (value, *value.all_input_nodes))
    return None if alike else describe(value)


def _of_two(value: object, *targets: object) -> bool:
    return isinstance(value, fx.Node) and is_call(value, *targets) and all(
        isinstance(a, fx.Node) and shape(a) == shape(value) for a in value.args[:2])


RULE = Rule(
    name="add_rms_norm",
    equation="x = a + b; rms_norm(x, gamma, eps)  →  npu_add_rms_norm(a, b, gamma, eps)",
    pattern=op(
        "cannopy::rms_norm",
        Alt((op(aten.add.Tensor, Any("a"), Any("b"), name="sum"), Any("other", _unlike_a_residual, "a residual sum"))),
        Any("gamma"),
        Number("eps"),
    ),
    check=check,
    rewrite=rewrite,
    kernel="npu_add_rms_norm",
    near=2,
)
