"""Where a node of a graph comes from: which keys of ``node.meta`` tell it, how it is printed, what must have it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from cannopy.fx_passes.graph import PROVENANCE

__all__ = ["PROVENANCE", "describe", "lines", "without_source"]


def describe(node: fx.Node) -> str:
    """``file.py:12 model.layers.3.self_attn [rule]`` from what is known of ``node``."""
    parts = [str(node.meta.get("source") or ""), str(node.meta.get("module_path") or "")]
    if node.meta.get("rule"):
        parts.append(f"[{node.meta['rule']}]")
    return " ".join(p for p in parts if p)


def lines(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The distinct source lines of ``nodes`` in order."""
    return tuple(dict.fromkeys(str(n.meta["source"]) for n in nodes if n.meta.get("source")))


def without_source(graph: fx.Graph) -> set[str]:
    """Names of the calls of ``graph`` that carry no ``source``."""
    return {n.name for n in graph.nodes if n.op == "call_function" and "source" not in n.meta}
