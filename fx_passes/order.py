"""Put a graph back into topological order after a rewrite that placed a node behind some of its users."""

from __future__ import annotations

from torch import fx


def sort(graph: fx.Graph) -> int:
    """Move nodes as little as possible so that every node stands behind its inputs; the number of nodes moved.

    Nodes keep their order where it was legal. A cycle raises ValueError with the nodes in it.
    """
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    for root in graph.nodes:
        stack = [(root, iter(root.all_input_nodes))] if root not in done else []
        open_nodes = {root}
        while stack:
            node, inputs = stack[-1]
            pending = next((i for i in inputs if i not in done), None)
            if pending is None:
                stack.pop()
                open_nodes.discard(node)
                if node not in done:
                    done.add(node)
                    order.append(node)
            elif pending in open_nodes:
                raise ValueError(f"the graph has a cycle through {pending.name} and {node.name}")
            else:
                open_nodes.add(pending)
                stack.append((pending, iter(pending.all_input_nodes)))
    moved = 0
    for wanted, previous in zip(order[1:], order, strict=False):
        if previous.next is not wanted:
            previous.append(wanted)
            moved += 1
    return moved
