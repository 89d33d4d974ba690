"""√d · x / ‖x‖ · γ  →  npu_rms_norm(x, γ, ε)[0]: RMSNorm as models write it that start from F.normalize."""

import math
import operator

import torch

import cannopy
from cannopy.rules import Any, Context, Match, Number, Refusal, aten, op, refused, shape

LENGTH = op(aten.linalg_vector_norm.default, Any("x"), Number("order", 2.0), Any("dims"), Any("keep"), name="length")
DIVISOR = op(aten.expand.default, op(aten.clamp_min.default, LENGTH, Number("least")), Any())
UNIT = op(aten.div.Tensor, Any("x"), DIVISOR)
SCALED = op(aten.mul.Tensor, UNIT, Number("scale"), name="scaled")


def emit(match: Match, call):
    """The fused op. x / max(‖x‖, least) · √d = x / √max(mean(x²), least² / d): ε only keeps a row of zeros at zero."""
    epsilon = match["least"] ** 2 / shape(match["x"])[-1]
    return call(torch.ops.npu.npu_rms_norm.default, match["x"], match["gamma"], epsilon)


def check(match: Match, context: Context) -> Refusal | None:
    size = shape(match["x"])
    if match["dims"] not in ([-1], [len(size) - 1]):
        return Refusal(f"npu_rms_norm works over the last dim, this norm over dims {match['dims']}", match["length"])
    if not math.isclose(match["scale"], math.sqrt(size[-1]), rel_tol=1e-6):
        return Refusal(f"the scale is {match['scale']:g}, RMSNorm has √{size[-1]} = {math.sqrt(size[-1]):g}",
                       match["scaled"])
    return refused(context, lambda call: emit(match, call), match.anchor)


@cannopy.rule(
    equation="√d · x / ‖x‖ · γ  →  npu_rms_norm(x, γ, ε)[0]",
    pattern=op(aten.mul.Tensor, SCALED, Any("gamma"), commutative=True),
    check=check,
    kernel="npu_rms_norm",
)
def unit_norm(match: Match, context: Context) -> None:
    call = context.editor.call
    context.editor.replace(match.anchor, call(operator.getitem, emit(match, call), 0))
