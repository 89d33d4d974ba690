"""What several rules look for or look through."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from cannopy.fusion_rules.engine.match import Match
from cannopy.fusion_rules.engine.pattern import Any as Anything
from cannopy.fusion_rules.engine.pattern import Literal, Number, Op, Pattern, op
from cannopy.fusion_rules.engine.rule import Refusal
from cannopy.fx_passes.graph import aten, dtype, is_call, shape

CAST = (aten._to_copy.default,)
RESHAPE = (aten.reshape.default,)
SWAP_HEADS = Literal([0, 2, 1, 3])
"""The dims of a permute between [B, N, S, D] and [B, S, N, D]."""
INTERLEAVED = Anything(where=lambda interleaved: None if interleaved is True else "a rotation of halves",
                       wants="a rotation of neighbouring pairs (rope_interleave=True)")
"""The last argument of the dialect's rotary, where an operator takes pairs only."""


def before_widening(value: fx.Node, narrow: torch.dtype) -> fx.Node:
    """What ``value`` was cast to fp32 from when that is of dtype ``narrow``, else ``value`` itself."""
    if is_call(value, *CAST) and dtype(value) == torch.float32:
        source = cast(fx.Node, value.args[0])
        if dtype(source) == narrow:
            return source
    return value


def half(of: Pattern, name: str) -> Op:
    """A slice of ``of``; binds ``name``_dim, _start, _end and _step."""
    return op(aten.slice.Tensor, of, *(Number(f"{name}_{k}") for k in ("dim", "start", "end", "step")))


def gated_halves_refusal(match: Match, dim: int, size: int) -> Refusal | None:
    """`half` "gate", whose SiLU is "silu", is the first and "up" the second of ``dim``, which has ``size`` entries."""
    gate, up = (tuple(match[f"{name}_{k}"] for k in ("dim", "start", "end", "step")) for name in ("gate", "up"))
    first, second = (dim, 0, size // 2, 1), (dim, size // 2, size, 1)
    if size % 2 == 0 and (gate, up) == (first, second):
        return None
    swapped = (gate, up) == (second, first)
    found = "the second half" if swapped else f"[start, end, step] {list(gate[1:])} with {list(up[1:])}"
    return Refusal(f"SiLU must be on the first half of dim {dim} and multiply the second, found {found}", match["silu"],
                   "order", f"SiLU on the first half of dim {dim}, times the second", found,
                   "put the gate in the first half of the merged projection, or swap the halves of its weight")


def wrong_shape(what: str, node: fx.Node, expected: str) -> Refusal:
    """``node``, which the user knows as ``what``, does not have the shape ``expected``, given in words."""
    found = str(list(shape(node)))
    return Refusal(f"{what} has shape {found}, expected {expected}", node, "shape", expected, found,
                   f"give {what} the shape {expected}")


def computed_weight(what: str, node: fx.Node, reason: str) -> Refusal:
    """A weight that has to be laid out anew at load time and is not a parameter or buffer, for ``reason``."""
    return Refusal(f"{what}: {reason}", node, "weight", "a parameter or buffer that the method does not change", reason,
                   f"keep the weight of {what} in the module as a parameter, and compute nothing on it in the method")


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call of an operator by name, defaults of its schema included."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise TypeError(f"{node.name} calls {target}, which has no schema")
    schema = target._schema.arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found.update(zip((a.name for a in schema), node.args, strict=False))
    found.update(node.kwargs)
    return found
