"""Reads the scopes of a graph back: which attributes each call gets, and runs of calls that get the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from cannopy.fx_passes.graph import is_call
from cannopy.stream_scheduler.emission import marks


@dataclass
class ScopeRun:
    """Calls one after the other under the same ``attributes``, empty outside of scopes."""

    attributes: Mapping[str, str]
    calls: list[fx.Node] = field(default_factory=list)


def scope_runs(graph: fx.Graph) -> list[ScopeRun]:
    """The calls of ``graph`` without scope marks, in order. An inner scope's value stands where two set one key;
    an empty SuperKernel name takes both of its attributes away, as torchair has it.

    `ValueError` for a scope that is left and not entered, or entered and not left.
    """
    stack: list[Mapping[str, str]] = []
    found: list[ScopeRun] = []
    for node in graph.nodes:
        if is_call(node, marks.enter()):
            stack.append(dict(zip(node.args[0], node.args[1], strict=True)))
        elif is_call(node, marks.leave()):
            if not stack:
                raise ValueError(f"{node.name} leaves a scope and none is open")
            stack.pop()
        elif node.op == "call_function":
            attributes = _merged(stack)
            if not found or found[-1].attributes != attributes:
                found.append(ScopeRun(attributes))
            found[-1].calls.append(node)
    if stack:
        raise ValueError(f"{len(stack)} scopes are entered and not left, the outermost sets {dict(stack[0])}")
    return found


def _merged(stack: list[Mapping[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for attributes in stack:
        found.update(attributes)
        if attributes.get(marks.SUPER_KERNEL) == "":
            found.pop(marks.SUPER_KERNEL, None)
            found.pop(marks.SUPER_KERNEL_OPTIONS, None)
    return found
