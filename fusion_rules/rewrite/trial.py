"""Emit a rewrite twice: first on fake values against the hardware contracts, then into the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cannopy.fusion_rules.contracts import check_call
from cannopy.fusion_rules.engine.rule import Context, Refusal

Call = Callable[..., Any]
"""``call(target, *args, **kwargs)``: `Editor.call` on nodes, or a trial on their fake values."""


class _IllegalCallError(Exception):
    """The first call of a trial that breaks its contract."""


def refused(context: Context, emit: Callable[[Call], object], node: fx.Node) -> Refusal | None:
    """A `Refusal` at ``node`` with the text of the first contract violation among the NPU calls of ``emit``.

    ``emit`` gets a call function that takes nodes and tensors, checks each ``torch.ops.npu`` call against the
    contract of ``context.target`` and returns fake values. Nothing is added to the graph.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "npu":
            broken = check_call(target._schema.name.removeprefix("npu::"), args, kwargs, context.target)
            if broken:
                raise _IllegalCallError("; ".join(str(violation) for violation in broken))
        with context.editor.fake_mode, torch.no_grad():
            return target(*args, **kwargs)

    try:
        emit(call)
    except _IllegalCallError as illegal:
        return Refusal(str(illegal), node)
    return None


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
