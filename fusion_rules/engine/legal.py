"""Ask the contracts of the device ops whether what a rule is about to emit is legal, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cannopy.fusion_rules.contracts import PRODUCTS, Violation, check_call
from cannopy.fusion_rules.engine.rule import Context, Refusal

DEVICE = ("npu", "air")
"""Namespaces of the device ops: torch_npu's, and torchair's own of the same names and contracts."""

Call = Callable[..., Any]
"""``call(target, *args, **kwargs)``: `Editor.call` on nodes, or a trial on their fake values."""


class _IllegalCallError(Exception):
    """The first call of a trial that breaks its contract."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def illegal(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node, ctx: Context,
    given: Mapping[str, Any] | None = None,
) -> Refusal | None:
    """A refusal that names every violated clause of ``op``'s contract for these (fake) arguments, or None.

    ``given`` are nodes of the model by argument: the refusal is at the one that breaks the first clause, else at
    ``node``.
    """
    broken = check_call(op, args, kwargs, product=ctx.target, cann=ctx.cann)
    if not broken:
        return None
    first = broken[0]
    others = [p for p in PRODUCTS if p != ctx.target and not check_call(op, args, kwargs, product=p, cann=ctx.cann)]
    source = (given or {}).get(first.argument)
    return Refusal(
        "; ".join(str(v) for v in broken), source if isinstance(source, fx.Node) else node, "contract",
        f"{first.argument} {first.expected}", first.found, _remedy(first, ctx.target, others), f"{op}.{first.clause}",
    )


def _remedy(violation: Violation, target: str, others: Sequence[str]) -> str:
    if violation.clause == "products":
        return f"{violation.op} is not on {target}: compile for {violation.expected.removeprefix('on ')}"
    limit = violation.clause.replace("-", " ")
    text = (f"{limit}: {violation.op} on {target} takes {violation.argument} {violation.expected}; "
            f"this model has {violation.found}")
    return f"{text} (it is legal on {', '.join(others)})" if others else text


def refused(context: Context, emit: Callable[[Call], object], node: fx.Node) -> Refusal | None:
    """A `Refusal` at ``node`` with the contract violations of the first illegal device call of ``emit``, or None.

    ``emit`` gets a call function that takes nodes and tensors, asks `illegal` about each call of a device op
    and returns fake values. Nothing is added to the graph.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs
        if isinstance(target, torch._ops.OpOverload) and target.namespace in DEVICE:
            given = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs
        args, kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if isinstance(target, torch._ops.OpOverload) and target.namespace in DEVICE:
            refusal = illegal(target._schema.name.partition("::")[2], args, kwargs, node, context, given)
            if refusal is not None:
                raise _IllegalCallError(refusal)
        return context.editor.value(target, *args, **kwargs)

    try:
        emit(call)
    except _IllegalCallError as error:
        return error.refusal
    return None
