"""cannopy::rms_norm(x, gamma, eps)  →  npu_rms_norm(x, gamma, eps)[0]."""

from __future__ import annotations

import operator

import torch

from cannopy.fusion_rules.engine.legal import illegal
from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any, Number, op
from cannopy.fusion_rules.engine.rule import Context, Refusal, Rule


def check(match: Match, ctx: Context) -> Refusal | None:
    """The op's contract."""
    args = (match["x"].meta["val"], match["gamma"].meta["val"], float(match["eps"]))
    return illegal("npu_rms_norm", args, {}, match.anchor, ctx, {"input": match["x"], "gamma": match["gamma"]})


def rewrite(match: Match, ctx: Context) -> None:
    """Emit the op; its second output (1 / rms) is not used."""
    out = ctx.editor.call(torch.ops.npu.npu_rms_norm.default, match["x"], match["gamma"], float(match["eps"]))
    ctx.editor.replace(match.anchor, ctx.editor.call(operator.getitem, out, 0))


RULE = Rule(
    name="rms_norm",
    equation="rms_norm(x, gamma, eps)  →  npu_rms_norm(x, gamma, eps)[0]",
    pattern=op("cannopy::rms_norm", Any("x"), Any("gamma"), Number("eps")),
    check=check,
    rewrite=rewrite,
    kernel="npu_rms_norm",
)
