"""Ask the contract of a device op whether a call would be legal, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from cannopy.fusion_rules.contracts import check_call
from cannopy.fusion_rules.engine.rule import Context, Refusal


def illegal(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node, ctx: Context
) -> Refusal | None:
    """A refusal that names every violated clause of ``op``'s contract for these (fake) arguments, or None."""
    violations = check_call(op, args, kwargs, product=ctx.target)
    if not violations:
        return None
    return Refusal("; ".join(str(v) for v in violations), node)
